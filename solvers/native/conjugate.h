// Conjugate gradients, sample by sample; in Python solvers/krylov/cg.py.
#pragma once
#include "gmres.h"

namespace {

// What the method keeps beside a cycle's product, direction (in `next`), norms, limit and counts.
struct Conjugate {
  void *iterate, *best;          // (n, D) of the residual norms now and least; null: the method is another
  void *square, *best_square;    // (n,) squares of these norms
  void *curvature, *rounding;    // (n,) of the last direction; squares below it are rounding
};

// The first direction of sample b, whose residual has this norm.
template <class T>
inline void start_conjugate(const Cycle& cycle, const Conjugate& own, const T* r, T norm, int64_t b) {
  const int64_t size = cycle.size;
  T* direction = static_cast<T*>(cycle.next) + b * size;
  T *iterate = static_cast<T*>(own.iterate) + b * size, *best = static_cast<T*>(own.best) + b * size;
  for (int64_t i = 0; i < size; i++) direction[i] = r[i], iterate[i] = best[i] = 0;
  const T square = norm * norm, eps = std::numeric_limits<T>::epsilon();
  static_cast<T*>(own.square)[b] = static_cast<T*>(own.best_square)[b] = square;
  static_cast<T*>(own.curvature)[b] = 1;
  static_cast<T*>(own.rounding)[b] = eps * eps * square;
}

// A step of sample b, whose residual is r, by the product of its direction.
template <class T>
inline void conjugate_of(const Cycle& cycle, const Conjugate& own, T* r, int64_t b) {
  if (!cycle.running[b]) return;
  const int64_t size = cycle.size;
  T* direction = static_cast<T*>(cycle.next) + b * size;
  const T* image = static_cast<const T*>(cycle.product) + b * size;
  T *iterate = static_cast<T*>(own.iterate) + b * size, *best = static_cast<T*>(own.best) + b * size;
  T *square = static_cast<T*>(own.square) + b, *best_square = static_cast<T*>(own.best_square) + b;
  T *norm = static_cast<T*>(cycle.matrix_norm) + b, *left = static_cast<T*>(cycle.residual_norm) + b;
  cycle.used[b]++;
  double bend = 0;
  over_chunks(size, [&](int64_t first, int64_t last) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; i++) sum += direction[i] * (direction[i] - image[i]);
    bend += sum;
  });
  const T curvature = static_cast<T>(bend);
  static_cast<T*>(own.curvature)[b] = curvature;
  cycle.running[b] = false;
  if (!(curvature > 0)) return;
  // 1 / alpha never exceeds a diagonal entry of the Lanczos matrix, hence never |A|.
  const T inverse = curvature / *square, alpha = 1 / inverse;
  *norm = std::fmax(*norm, inverse);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    iterate[i] += alpha * direction[i];
    r[i] -= alpha * (direction[i] - image[i]);
  }
  const T after = dot(r, r, size), beta = after / *square;
  if (after < *best_square) {
    for (int64_t i = 0; i < size; i++) best[i] = iterate[i];
    *best_square = after;
    *left = std::sqrt(after);
  }
#pragma omp simd
  for (int64_t i = 0; i < size; i++) direction[i] = r[i] + beta * direction[i];
  *square = after;
  const T limit = static_cast<const T*>(cycle.limit)[b];
  cycle.running[b] = after > limit * limit;
}

// Whether sample b has ended at a direction of no positive curvature, before its residual is rounding.
template <class T>
inline bool indefinite(const Cycle& cycle, const Conjugate& own, int64_t b) {
  const T curvature = static_cast<const T*>(own.curvature)[b], limit = static_cast<const T*>(cycle.limit)[b];
  const T best = static_cast<const T*>(own.best_square)[b];
  const bool finite = std::isfinite(curvature) && std::isfinite(static_cast<const T*>(own.square)[b]);
  return finite && curvature <= 0 && best > static_cast<const T*>(own.rounding)[b] && best > limit * limit;
}

}  // namespace
