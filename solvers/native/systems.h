// Linear systems (I - M) u = g solved by cycles of GMRES or conjugate gradients, each verified by one product
// with M at its end; in Python solvers/compiled/backward.py.
#pragma once
#include "conjugate.h"

namespace {

// The systems of all samples, from cycle to cycle; see Systems in solvers/native/systems.py.
struct Systems {
  Cycle cycle;                   // its limit is `target`, its beta and residual_norm are filled here
  Conjugate conjugate;
  const void* right;             // (B, D) g
  void *u, *residual;            // (B, D)
  void *target, *beta;           // (B,) what the cycle is to reach; the norm it began with
  void *reference, *size;        // (B,) norms of g and of the residual
  void* relative;                // (B,) their ratio, 0 where g is
  void *left, *before;           // (B,) the cycle's own residual norm, the norm of u before it
  const void *rtol, *atol;       // (B,) or one number
  int64_t *steps, *products;     // (B,)
  bool* open;                    // (B,)
  int64_t each_rtol, each_atol;
  int64_t trusting;              // what the recurrence says of its residual is enough where it is accurate
  double moderate, gap, halved, less;
};
constexpr int64_t SOLVED = 0, GOES_ON = 1, GIVEN_UP = 2, IMMODERATE = -1;

template <class T>
inline T limit_of(const Systems& all, int64_t b) {
  const T rtol = static_cast<const T*>(all.rtol)[all.each_rtol ? b : 0];
  const T atol = static_cast<const T*>(all.atol)[all.each_atol ? b : 0];
  return std::fmax(static_cast<const T*>(all.reference)[b] * rtol, atol);
}

// The first direction of a cycle, from the residual of sample b and its norm.
template <class T>
inline void start_cycle(const Systems& all, int64_t b) {
  const Cycle& cycle = all.cycle;
  const int64_t size = cycle.size, width = cycle.capacity + 1;
  const T norm = static_cast<const T*>(all.size)[b];
  const T* residual = static_cast<const T*>(all.residual) + b * size;
  static_cast<T*>(cycle.residual_norm)[b] = norm;
  static_cast<T*>(cycle.matrix_norm)[b] = 0;
  cycle.running[b] = all.open[b] = norm > limit_of<T>(all, b);
  cycle.used[b] = 0;
  if (all.conjugate.best) return start_conjugate(cycle, all.conjugate, residual, norm, b);
  T* direction = static_cast<T*>(cycle.next) + b * size;
  T* vector = static_cast<T*>(cycle.basis) + b * cycle.capacity * size;
  const T divisor = norm > 0 ? norm : T(1);
  for (int64_t i = 0; i < size; i++) vector[i] = direction[i] = residual[i] / divisor;
  T* null = static_cast<T*>(cycle.null) + b * width;
  for (int64_t j = 0; j < width; j++) null[j] = j == 0;
  static_cast<T*>(all.beta)[b] = norm;
  cycle.broken[b] = false;
  cycle.columns[b] = 0;
}

// u = 0 and the first cycle. How many samples run; IMMODERATE where a norm's square may be out of range.
template <class T>
int64_t begin(const Systems& all) {
  const int64_t size = all.cycle.size;
  std::atomic<int64_t> running{0};
  std::atomic<bool> moderate{true};
  over_rows(all.cycle.fork, all.cycle.threads, all.cycle.rows, all.cycle.rows * size * 4,
            [&](int64_t first, int64_t last) {
              int64_t own = 0;
              for (int64_t b = first; b < last; b++) {
                const T* right = static_cast<const T*>(all.right) + b * size;
                T* u = static_cast<T*>(all.u) + b * size;
                T* residual = static_cast<T*>(all.residual) + b * size;
                const T norm = std::sqrt(dot(right, right, size));
                bool zero = true;  // a norm of 0 may be a square that is too small for a number
                for (int64_t i = 0; i < size; i++) {
                  u[i] = 0;
                  residual[i] = right[i];
                  zero &= right[i] == 0;
                }
                // Not so for NaN.
                if (!(zero || (norm > 1 / all.moderate && norm < all.moderate))) moderate = false;
                static_cast<T*>(all.reference)[b] = static_cast<T*>(all.size)[b] = norm;
                all.steps[b] = all.products[b] = 0;
                static_cast<T*>(all.target)[b] = limit_of<T>(all, b);
                start_cycle<T>(all, b);
                own += all.cycle.running[b];
              }
              running += own;
            });
  return moderate ? running.load() : IMMODERATE;
}

// A step by the product of M with the direction. How many samples go on.
template <class T>
int64_t advance(const Systems& all) {
  const Cycle& cycle = all.cycle;
  if (!all.conjugate.best) return absorb<T>(cycle);
  std::atomic<int64_t> running{0};
  over_rows(cycle.fork, cycle.threads, cycle.rows, cycle.rows * cycle.size * 8,
            [&](int64_t first, int64_t last) {
              int64_t own = 0;
              for (int64_t b = first; b < last; b++) {
                conjugate_of(cycle, all.conjugate, static_cast<T*>(all.residual) + b * cycle.size, b);
                own += cycle.running[b];
              }
              running += own;
            });
  return running;
}

// u after a cycle.
template <class T>
void correct(const Systems& all) {
  const Cycle& cycle = all.cycle;
  const int64_t size = cycle.size;
  over_rows(cycle.fork, cycle.threads, cycle.rows, cycle.rows * size * (cycle.step + 2),
            [&](int64_t first, int64_t last) {
              for (int64_t b = first; b < last; b++) {
                T* u = static_cast<T*>(all.u) + b * size;
                T* left = static_cast<T*>(all.left) + b;
                static_cast<T*>(all.before)[b] = std::sqrt(dot(u, u, size));
                T* change = static_cast<T*>(all.residual) + b * size;  // which is computed anew soon
                if (all.conjugate.best) {
                  change = static_cast<T*>(all.conjugate.best) + b * size;
                  *left = static_cast<const T*>(cycle.residual_norm)[b];
                } else {
                  finish_of(cycle, change, left, b);
                }
                add(u, T(1), change, size);
              }
            });
}

// The cycle's own account of sample b, whose u it has corrected.
struct Account {
  bool accurate, claimed;        // its residual is right but for rounding; the target was met
};

template <class T>
inline Account account_of(const Systems& all, int64_t b) {
  const Cycle& cycle = all.cycle;
  const T* u = static_cast<const T*>(all.u) + b * cycle.size;
  const T length = std::fmax(std::sqrt(dot(u, u, cycle.size)), static_cast<const T*>(all.before)[b]);
  const T left = static_cast<const T*>(all.left)[b], limit = limit_of<T>(all, b);
  const T gap = static_cast<T>(all.gap) * (static_cast<const T*>(cycle.matrix_norm)[b] * length +
                                           static_cast<const T*>(all.reference)[b]);
  const T target = static_cast<const T*>(all.target)[b];
  const bool claimed = all.conjugate.best
                           ? static_cast<const T*>(all.conjugate.best_square)[b] <= target * target
                           : static_cast<const T*>(cycle.residual_norm)[b] <= target;
  return {gap <= std::fmax(left, limit) && left <= limit && std::isfinite(length), claimed};
}

// Whether every sample that was open is solved by the cycle's own account, which is then what is told of it.
template <class T>
int64_t settled(const Systems& all) {
  const int64_t rows = all.cycle.rows;
  for (int64_t b = 0; b < rows; b++) {
    if (!all.open[b]) continue;
    const Account own = account_of<T>(all, b);
    if (!own.accurate || !own.claimed) return 0;
  }
  for (int64_t b = 0; b < rows; b++) {
    const T left = static_cast<const T*>(all.left)[b], reference = static_cast<const T*>(all.reference)[b];
    all.steps[b] += all.cycle.used[b];
    all.products[b] += all.cycle.used[b];
    static_cast<T*>(all.size)[b] = left;
    static_cast<T*>(all.relative)[b] = reference > 0 ? left / reference : T(0);
  }
  return 1;
}

// The true residual of sample b, from M u, and whether a further cycle is worth while.
template <class T>
inline int64_t verify_of(const Systems& all, const T* image, int64_t b) {
  const Cycle& cycle = all.cycle;
  const int64_t size = cycle.size;
  const T* right = static_cast<const T*>(all.right) + b * size;
  const T* u = static_cast<const T*>(all.u) + b * size;
  T* residual = static_cast<T*>(all.residual) + b * size;
  for (int64_t i = 0; i < size; i++) residual[i] = right[i] - (u[i] - image[i]);
  T norm = std::sqrt(dot(residual, residual, size));
  const T limit = limit_of<T>(all, b);
  // Where the recurrence's residual was good enough, the product with u counts as none.
  const auto [accurate, claimed] = account_of<T>(all, b);
  const bool trusted = all.trusting && accurate && claimed;
  if (trusted) norm = static_cast<const T*>(all.left)[b];
  const bool lost = all.conjugate.best && indefinite<T>(cycle, all.conjugate, b);
  T* target = static_cast<T*>(all.target) + b;
  all.steps[b] += cycle.used[b];
  all.products[b] += cycle.used[b] + (all.open[b] && !accurate);
  T* norm_before = static_cast<T*>(all.size) + b;
  const bool within = norm <= limit;
  // Less may be gained, and the target stays, where a restart ended the cycle.
  const T factor = static_cast<T>(claimed ? all.halved : all.less);
  const bool gained = within || norm <= factor * *norm_before;
  if (all.open[b] && claimed) *target = static_cast<T>(all.halved) * limit;
  *norm_before = norm;
  const T reference = static_cast<const T*>(all.reference)[b];
  static_cast<T*>(all.relative)[b] = reference > 0 ? norm / reference : T(0);
  start_cycle<T>(all, b);
  return lost || !gained ? GIVEN_UP : within ? SOLVED : GOES_ON;
}

// The worst that is true of any sample.
template <class T>
int64_t verify(const Systems& all, const void* image) {
  const int64_t size = all.cycle.size;
  std::atomic<bool> open{false}, poor{false};
  over_rows(all.cycle.fork, all.cycle.threads, all.cycle.rows, all.cycle.rows * size * 4,
            [&](int64_t first, int64_t last) {
              for (int64_t b = first; b < last; b++) {
                const int64_t found = verify_of(all, static_cast<const T*>(image) + b * size, b);
                if (found != SOLVED) open = true;
                if (found == GIVEN_UP) poor = true;
              }
            });
  return poor ? GIVEN_UP : open ? GOES_ON : SOLVED;
}

}  // namespace
