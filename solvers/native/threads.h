// Slots of work shared by threads, and memory that a thread keeps from call to call.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdlib>

namespace {

// GOMP_parallel of the OpenMP library that the caller uses already: its threads are there and awake,
// while threads of our own would compete with them.
using Fork = void (*)(void (*)(void*), void*, unsigned, unsigned);
constexpr int MOST_THREADS = 256;

template <class Work>
struct Team {
  Work* work;
  int slots;
  std::atomic<int> next{0};

  static void join(void* itself) {
    Team* team = static_cast<Team*>(itself);
    for (int slot; (slot = team->next++) < team->slots;) (*team->work)(slot);
  }
};

// work(slot) for every slot below `slots`, whatever number of threads comes to do it; one without OpenMP.
template <class Work>
void in_parallel(Fork fork, int slots, Work work) {
  Team<Work> team{&work, slots};
  if (slots > 1 && fork)
    fork(Team<Work>::join, &team, static_cast<unsigned>(slots), 0);
  else
    Team<Work>::join(&team);
}

// Floats on cache lines. Memory beyond MOST_KEPT is given back after each call.
class Arena {
 public:
  ~Arena() { std::free(memory_); }

  bool reserve(std::size_t floats) {
    used_ = 0;
    if (floats <= size_) return true;
    std::free(memory_);
    memory_ = static_cast<float*>(std::aligned_alloc(64, rounded(floats) * sizeof(float)));
    size_ = memory_ ? rounded(floats) : 0;
    return memory_ != nullptr;
  }
  float* take(std::size_t floats) {
    float* start = memory_ + used_;
    used_ += rounded(floats);
    return start;
  }
  void release() {
    if (size_ <= MOST_KEPT) return;
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }
  static std::size_t rounded(std::size_t floats) { return (floats + 15) / 16 * 16; }

 private:
  static constexpr std::size_t MOST_KEPT = std::size_t{1} << 22;
  float* memory_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

inline Arena& arena_of_this_thread() {
  static thread_local Arena arena;
  return arena;
}

}  // namespace
