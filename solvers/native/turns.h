// Turns of a solve z = f(z) by Anderson's method or by plain steps: every row is judged and makes its step. The
// same decisions in torch: solvers/core/loop.py; the same step: solvers/methods/anderson.py.
#pragma once
#include <limits>

#include "sums.h"

namespace {

constexpr int64_t MOST = 64;  // differences that are kept of a sample, as solvers/native/__init__.py knows
constexpr int64_t RUNNING = -1, CONVERGED = 0, MAX_STEPS = 1, STALLED = 2, DIVERGED = 3, NONFINITE = 4;
constexpr int64_t MAX_REJECTIONS = 40;

// A solve. Arrays are of all B samples, whose rows n of the batch may be fewer: `index` says which.
struct Turns {
  const void *trial, *value;      // (n, D) where f was evaluated, and f there
  void* next;                     // (n, D) where it is to be evaluated next
  const int64_t* index;           // (n,) samples of the rows
  const bool* mask;               // (B, D) or null
  void *z, *residual;             // (B, D) the point accepted last
  void *steps, *changes, *gram;   // (B, kept, D) twice, (B, kept, kept): differences, as a ring
  void *best, *relative, *norm;   // (B, D), (B,), (B,)
  void *limit, *milestone, *scale;  // (B,) as Rows and Backtracking have them
  int64_t *status, *evaluations, *rejected, *rejections, *count;  // (B,)
  void* fork;
  int64_t threads, rows, size, kept, evaluation, max_steps, patience;
  double rtol, atol, damping, ridge, tiny, divergence, moderate;
};

template <class T>
inline T* of(void* array, int64_t at) {
  return static_cast<T*>(array) + at;
}
template <class T>
inline const T* of(const void* array, int64_t at) {
  return static_cast<const T*>(array) + at;
}

// The step of sample b from z with this residual, which stands in `next` and is replaced by the next point.
template <class T>
inline void anderson(const Turns& all, int64_t b, const T* z, T* next) {
  const int64_t size = all.size, kept = all.kept;
  const T damping = static_cast<T>(all.damping);
  T *z_before = of<T>(all.z, b * size), *residual_before = of<T>(all.residual, b * size);
  T weights[MOST];
  T* steps = of<T>(all.steps, b * kept * size);
  int64_t filled = 0;
  if (kept > 0 && all.evaluation > 1) {
    T system[MOST * MOST], row[MOST];
    T *changes = of<T>(all.changes, b * kept * size), *gram = of<T>(all.gram, b * kept * kept);
    const int64_t slot = all.count[b] % kept;
    filled = ++all.count[b] < kept ? all.count[b] : kept;
    T *step = steps + slot * size, *change = changes + slot * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      const T difference = next[i] - residual_before[i];
      change[i] = difference;
      step[i] = z[i] - z_before[i] + damping * difference;
    }
    dots(changes, change, filled, size, row);
    dots(changes, next, filled, size, weights);
    // Relative to the diagonal; a difference of zero gets the weight zero.
    row[slot] = row[slot] * static_cast<T>(all.ridge) + static_cast<T>(all.tiny);
    for (int64_t j = 0; j < filled; j++) gram[slot * kept + j] = gram[j * kept + slot] = row[j];
    for (int64_t i = 0; i < filled; i++)
      for (int64_t j = 0; j < filled; j++) system[i * MOST + j] = gram[i * kept + j];
    solve(system, weights, filled, MOST);
  }
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    z_before[i] = z[i];
    residual_before[i] = next[i];
    next[i] = z[i] + damping * next[i];
  }
  subtract(next, weights, steps, filled, size);
}

// Norm of n numbers of any magnitude.
template <class T, class Number>
inline T exact_norm(int64_t n, Number number) {
  T largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const T size = std::fabs(number(i));
    if (!std::isfinite(size)) return size;
    largest = size > largest ? size : largest;
  }
  if (largest == 0) return 0;
  int exponent;
  std::frexp(static_cast<double>(largest), &exponent);
  exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    const double part = std::ldexp(static_cast<double>(number(i)), -exponent);
    sum += part * part;
  }
  return static_cast<T>(std::ldexp(std::sqrt(sum), exponent));
}

template <class T>
struct Norms {
  T residual, value;
};

// f(z) - z of a row, and the norms of it and of f; masked coordinates are zero in all of them.
template <class T>
inline Norms<T> residual_of(const T* z, const T* f, const bool* mask, T* residual, int64_t size, T moderate) {
  double rest = 0, whole = 0;
  over_chunks(size, [&](int64_t first, int64_t last) {
    T rest_squares = 0, squares = 0;
#pragma omp simd reduction(+ : rest_squares, squares)
    for (int64_t i = first; i < last; i++) {
      const bool free = !mask || mask[i];
      const T value = free ? f[i] : T(0), difference = free ? f[i] - z[i] : T(0);
      residual[i] = difference;
      rest_squares += difference * difference;
      squares += value * value;
    }
    rest += rest_squares;
    whole += squares;
  });
  const Norms<T> norms{static_cast<T>(std::sqrt(rest)), static_cast<T>(std::sqrt(whole))};
  const bool fits = norms.value > moderate && std::isfinite(norms.residual + norms.value);
  if (fits) return norms;  // no square did any harm
  return {exact_norm<T>(size, [&](int64_t i) { return residual[i]; }),
          exact_norm<T>(size, [&](int64_t i) { return !mask || mask[i] ? f[i] : T(0); })};
}

// Whether a row that rejects its trial has failed; RUNNING where it has not.
template <class T>
inline int64_t given_up(const Turns& all, int64_t b, T norm, bool finite) {
  const int64_t rejections = all.rejections[b];
  if (rejections > 0 && norm > *of<T>(all.limit, b)) return DIVERGED;
  if (rejections < (all.evaluation > 1 ? MAX_REJECTIONS : 0)) return RUNNING;
  return finite ? STALLED : NONFINITE;
}

template <class T>
inline void turn_of(const Turns& all, int64_t row, int64_t b) {
  const int64_t size = all.size;
  const T* trial = of<T>(all.trial, row * size);
  T *next = of<T>(all.next, row * size), *best = of<T>(all.best, b * size);
  T *best_relative = of<T>(all.relative, b), *limit = of<T>(all.limit, b), *scale = of<T>(all.scale, b);
  T* milestone = of<T>(all.milestone, b);
  const bool* mask = all.mask ? all.mask + b * size : nullptr;
  const auto [norm, reference] = residual_of(trial, of<T>(all.value, row * size), mask, next, size,
                                             static_cast<T>(all.moderate));
  const bool first = all.evaluation == 1, finite = std::isfinite(norm + reference);
  constexpr T most = std::numeric_limits<T>::max(), none = std::numeric_limits<T>::infinity();
  if (first) {
    *limit = static_cast<T>(all.divergence) * std::fmax(norm, reference);
    *best_relative = *of<T>(all.norm, b) = *milestone = none;
    *scale = 1;
    all.rejected[b] = all.rejections[b] = all.count[b] = 0;
    std::copy(trial, trial + size, best);
  }
  all.evaluations[b] = all.evaluation;
  const bool accepted = finite && (first || norm <= *limit);
  const bool converged =
      accepted && norm <= std::fmax(reference * static_cast<T>(all.rtol), static_cast<T>(all.atol));
  // Where f(z) = 0 the ratio may overflow; where f(z) is subnormal it is a ratio like any other.
  const T relative = std::fmin(norm / (reference > 0 ? reference : std::numeric_limits<T>::min()), most);
  if (converged || (accepted && relative < *best_relative)) {
    std::copy(trial, trial + size, best);
    *best_relative = relative;
    *of<T>(all.norm, b) = norm;
  }
  int64_t status = converged ? CONVERGED : accepted ? RUNNING : given_up<T>(all, b, norm, finite);
  if (!accepted) all.rejected[b]++;
  if (status == RUNNING && all.evaluation >= all.max_steps) status = MAX_STEPS;
  if (all.evaluation % all.patience == 0) {
    if (status == RUNNING && *best_relative > static_cast<T>(0.99) * *milestone) status = STALLED;
    *milestone = *best_relative;
  }
  all.status[b] = status;
  if (status != RUNNING) return;
  if (accepted) {
    if (all.rejections[b] > 0) *scale = std::fmin(2 * *scale, T(1));
    all.rejections[b] = 0;
    return anderson(all, b, trial, next);
  }
  // A shortened step along the last residual; the differences are forgotten.
  if (++all.rejections[b] > 1) *scale /= 2;
  all.count[b] = 0;
  const T *z = of<T>(all.z, b * size), *residual = of<T>(all.residual, b * size);
  for (int64_t i = 0; i < size; i++) next[i] = z[i] + *scale * residual[i];
}

// How many of the rows go on; those that have ended wait at their best iterates.
template <class T>
int64_t turn(const Turns& all) {
  std::atomic<int64_t> running{0};
  const int64_t size = all.size;
  over_rows(all.fork, all.threads, all.rows, all.rows * size * (3 * all.kept + 4),
            [&](int64_t begin, int64_t end) {
              int64_t own = 0;
              for (int64_t row = begin; row < end; row++) {
                const int64_t b = all.index[row];
                if (all.evaluation == 1 || all.status[b] == RUNNING) turn_of<T>(all, row, b);
                if (all.status[b] == RUNNING) {
                  own++;
                } else {
                  const T* best = of<T>(all.best, b * size);
                  std::copy(best, best + size, of<T>(all.next, row * size));
                }
              }
              running += own;
            });
  return running;
}

}  // namespace
