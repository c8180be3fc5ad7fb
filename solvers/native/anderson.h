// Evaluations of a fixed-point map judged sample by sample, and the steps of Anderson's method between them;
// in Python solvers/compiled/lanes.py and solvers/methods/anderson.py.
#pragma once
#include <atomic>
#include <limits>

#include "sums.h"

namespace {

constexpr int64_t MOST = 64;  // vectors that are kept of a sample, as solvers/native/steps.py knows
constexpr int64_t RUNNING = -1, LEFT = -2, CONVERGED = 0, MAX_STEPS = 1;

// Differences of the last steps, as AndersonState has them.
struct Ring {
  void *steps, *changes;         // (B, kept, D)
  void* gram;                    // (B, kept, kept)
  void *z, *residual;            // (B, D) the point before this one
  int64_t kept, count;           // slots; differences made before this step
  int64_t keeps;                 // z and residual are the ring's own, to be brought up to date
  double damping, ridge, tiny;
};

// The next point of sample b, at z with this residual, to `next`, which may be z. Zero slots: plain.
template <class T>
inline void anderson(const Ring& ring, int64_t b, int64_t size, bool first, const T* z,
                     const T* residual, T* next) {
  const T damping = static_cast<T>(ring.damping);
  const int64_t kept = ring.kept;
  if (kept == 0) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) next[i] = z[i] + damping * residual[i];
    return;
  }
  T* z_before = static_cast<T*>(ring.z) + b * size;
  T* residual_before = static_cast<T*>(ring.residual) + b * size;
  T weights[MOST], system[MOST * MOST];
  int64_t filled = 0;
  T* steps = static_cast<T*>(ring.steps) + b * kept * size;
  if (!first) {
    T* changes = static_cast<T*>(ring.changes) + b * kept * size;
    T* gram = static_cast<T*>(ring.gram) + b * kept * kept;
    const int64_t slot = ring.count % kept;
    filled = ring.count + 1 < kept ? ring.count + 1 : kept;
    T *step = steps + slot * size, *change = changes + slot * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      const T difference = residual[i] - residual_before[i];
      change[i] = difference;
      step[i] = z[i] - z_before[i] + damping * difference;
    }
    T row[MOST];
    dots(changes, change, filled, size, row);
    dots(changes, residual, filled, size, weights);
    row[slot] = row[slot] * static_cast<T>(ring.ridge) + static_cast<T>(ring.tiny);
    for (int64_t j = 0; j < filled; j++) gram[slot * kept + j] = gram[j * kept + slot] = row[j];
    for (int64_t i = 0; i < filled; i++)
      for (int64_t j = 0; j < filled; j++) system[i * MOST + j] = gram[i * kept + j];
    solve(system, weights, filled, MOST);
  }
  if (ring.keeps) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      z_before[i] = z[i];
      residual_before[i] = residual[i];
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < size; i++) next[i] = z[i] + damping * residual[i];
  subtract(next, weights, steps, filled, size);
}

// An evaluation of all samples that have not ended. The first one sets what is told of each.
struct Turn {
  Ring ring;
  const void* trial;             // (B, D) where f was evaluated
  void* next;                    // (B, D) where it is to be evaluated next; it may be trial
  const void* value;             // (B, D) f there
  const bool* mask;              // (B, D) or null
  void *residual, *best;         // (B, D)
  void *best_relative, *best_norm, *limit, *milestone;  // (B,)
  const void *rtol, *atol;       // (B,) or one number
  int64_t *status, *evaluations;  // (B,)
  void* fork;
  int64_t threads, batch, size, count, max_steps, patience, each_rtol, each_atol;
  double moderate, divergence;
};

template <class T>
struct Judged {
  T norm, reference;
};

// Residual of a sample, and the norms of it and of f; masked coordinates are zero in all of them.
template <class T>
inline Judged<T> residual_of(const T* z, const T* f, const bool* mask, T* residual, int64_t size) {
  double norm = 0, reference = 0;
  over_chunks(size, [&](int64_t first, int64_t last) {
    T rest_squares = 0, squares = 0;
    if (mask) {
      for (int64_t i = first; i < last; i++) {
        const T value = mask[i] ? f[i] : T(0);
        residual[i] = mask[i] ? f[i] - z[i] : T(0);
        rest_squares += residual[i] * residual[i];
        squares += value * value;
      }
    } else {
#pragma omp simd reduction(+ : rest_squares, squares)
      for (int64_t i = first; i < last; i++) {
        const T rest = f[i] - z[i];
        residual[i] = rest;
        rest_squares += rest * rest;
        squares += f[i] * f[i];
      }
    }
    norm += rest_squares;
    reference += squares;
  });
  return {static_cast<T>(std::sqrt(norm)), static_cast<T>(std::sqrt(reference))};
}

template <class T>
inline void turn_of(const Turn& turn, int64_t b) {
  const int64_t size = turn.size;
  const T* z = static_cast<const T*>(turn.trial) + b * size;
  T* residual = static_cast<T*>(turn.residual) + b * size;
  T *best_relative = static_cast<T*>(turn.best_relative) + b, *limit = static_cast<T*>(turn.limit) + b;
  const Judged<T> found =
      residual_of(z, static_cast<const T*>(turn.value) + b * size,
                  turn.mask ? turn.mask + b * size : nullptr, residual, size);
  const bool first = turn.count == 1;
  if (first) {
    *limit = static_cast<T>(turn.divergence) * std::fmax(found.norm, found.reference);
    constexpr T none = std::numeric_limits<T>::infinity();
    *best_relative = static_cast<T*>(turn.best_norm)[b] = static_cast<T*>(turn.milestone)[b] = none;
  }
  // Not so for NaN. A square that may have under- or overflowed is for the ordinary loop, too.
  const bool fine = found.norm <= *limit && found.reference > static_cast<T>(turn.moderate) &&
                    found.reference + found.norm <= std::numeric_limits<T>::max();
  turn.evaluations[b] = turn.count;
  if (!fine) {
    turn.status[b] = LEFT;
    return;
  }
  const T relative = found.norm / found.reference;
  const T rtol = static_cast<const T*>(turn.rtol)[turn.each_rtol ? b : 0];
  const T atol = static_cast<const T*>(turn.atol)[turn.each_atol ? b : 0];
  const bool converged = found.norm <= std::fmax(found.reference * rtol, atol);
  if (converged || relative < *best_relative) {
    T* best = static_cast<T*>(turn.best) + b * size;
    for (int64_t i = 0; i < size; i++) best[i] = z[i];
    *best_relative = relative;
    static_cast<T*>(turn.best_norm)[b] = found.norm;
  }
  if (converged) {
    turn.status[b] = CONVERGED;
    return;
  }
  if (turn.count >= turn.max_steps) {
    turn.status[b] = MAX_STEPS;
    return;
  }
  if (turn.count % turn.patience == 0) {
    T* milestone = static_cast<T*>(turn.milestone) + b;
    if (*best_relative > static_cast<T>(0.99) * *milestone) turn.status[b] = LEFT;
    *milestone = *best_relative;
    if (turn.status[b] == LEFT) return;
  }
  anderson(turn.ring, b, size, first, z, residual, static_cast<T*>(turn.next) + b * size);
}

// A sample that has ended stays where it is.
template <class T>
inline void stay(const Turn& turn, int64_t b) {
  const T* z = static_cast<const T*>(turn.trial) + b * turn.size;
  T* next = static_cast<T*>(turn.next) + b * turn.size;
  for (int64_t i = 0; i < turn.size; i++) next[i] = z[i];
}

// How many samples go on.
template <class T>
int64_t turn_of_all(const Turn& turn) {
  std::atomic<int64_t> running{0};
  const int64_t products = turn.batch * turn.size * (3 * turn.ring.kept + 4);
  over_rows(turn.fork, turn.threads, turn.batch, products, [&](int64_t begin, int64_t end) {
    int64_t own = 0;
    for (int64_t b = begin; b < end; b++) {
      if (turn.count == 1) turn.status[b] = RUNNING;
      if (turn.status[b] == RUNNING) turn_of<T>(turn, b);
      own += turn.status[b] == RUNNING;
      if (turn.status[b] != RUNNING && turn.next != turn.trial) stay<T>(turn, b);
    }
    running += own;
  });
  return running;
}

// A step of Anderson's method alone, for a loop that judges by itself.
struct Step {
  Ring ring;
  const void *z, *residual;      // (B, D)
  void* next;                    // (B, D)
  void* fork;
  int64_t threads, batch, size, first;
};

template <class T>
void step_of_all(const Step& step) {
  const int64_t size = step.size;
  const int64_t products = step.batch * size * (3 * step.ring.kept + 1);
  over_rows(step.fork, step.threads, step.batch, products, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      anderson(step.ring, b, size, step.first != 0, static_cast<const T*>(step.z) + b * size,
               static_cast<const T*>(step.residual) + b * size, static_cast<T*>(step.next) + b * size);
  });
}

// An evaluation of all samples, and the step after it where every running sample has come nearer, none
// has arrived and nothing is out of the ordinary; see Moves in solvers/native/moves.py.
struct Move {
  Ring ring;
  const void *z, *value;         // (B, D)
  void *residual, *next;         // (B, D)
  void *norm, *reference, *relative;  // (B,)
  const void *best_relative, *limit;  // (B,)
  const void *rtol, *atol;       // (B,) or one number
  const int64_t* status;         // (B,) or null where all run
  void* fork;
  int64_t threads, batch, size, wanted, each_rtol, each_atol;
  double moderate;
};
constexpr int64_t NORMS = 0, MOVE = 1, STEP = 2;  // that may be wanted: what solvers/native/moves.py knows

// Whether sample b, with these norms, is one after which the solve just goes on.
template <class T>
inline bool goes_on(const Move& move, int64_t b, const Judged<T>& found, T relative) {
  // Not so for NaN.
  const bool fine = found.norm <= static_cast<const T*>(move.limit)[b] &&
                    found.reference > static_cast<T>(move.moderate) &&
                    found.reference <= std::numeric_limits<T>::max() &&
                    relative <= std::numeric_limits<T>::max();
  if (!fine) return false;
  if (move.status && move.status[b] != RUNNING) return true;
  const T rtol = static_cast<const T*>(move.rtol)[move.each_rtol ? b : 0];
  const T atol = static_cast<const T*>(move.atol)[move.each_atol ? b : 0];
  const bool converged = found.norm <= std::fmax(found.reference * rtol, atol);
  return !converged && relative < static_cast<const T*>(move.best_relative)[b];
}

// Residuals and norms; whether the step is to be made, too.
template <class T>
bool judged(const Move& move) {
  const int64_t size = move.size;
  const T *z = static_cast<const T*>(move.z), *value = static_cast<const T*>(move.value);
  T* residual = static_cast<T*>(move.residual);
  std::atomic<bool> all{move.wanted == MOVE};
  over_rows(move.fork, move.threads, move.batch, move.batch * size * 2, [&](int64_t begin, int64_t end) {
    bool own = move.wanted == MOVE;
    for (int64_t b = begin; b < end; b++) {
      const Judged<T> found = residual_of(z + b * size, value + b * size,
                                          static_cast<const bool*>(nullptr), residual + b * size, size);
      const T relative = found.norm / found.reference;
      static_cast<T*>(move.norm)[b] = found.norm;
      static_cast<T*>(move.reference)[b] = found.reference;
      static_cast<T*>(move.relative)[b] = relative;
      own = own && goes_on(move, b, found, relative);
    }
    if (!own) all = false;
  });
  return all;
}

// Whether the step was made.
template <class T>
int64_t move_of_all(const Move& move) {
  if (move.wanted != STEP && !judged<T>(move)) return 0;
  const int64_t size = move.size;
  const int64_t products = move.batch * size * (3 * move.ring.kept + 1);
  over_rows(move.fork, move.threads, move.batch, products, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      anderson(move.ring, b, size, move.ring.z == nullptr, static_cast<const T*>(move.z) + b * size,
               static_cast<const T*>(move.residual) + b * size, static_cast<T*>(move.next) + b * size);
  });
  return 1;
}

}  // namespace
