// Cycles of GMRES, sample by sample; in Python solvers/krylov/gmres.py.
#pragma once
#include <atomic>
#include <limits>

#include "sums.h"

namespace {

constexpr int64_t MOST_STEPS = 64;  // of a cycle, as solvers/native/steps.py knows

// A cycle of GMRES, whose arrays GMRESRun describes.
struct Cycle {
  const void *product, *direction;  // (n, D) of the matrix with the direction; of J^T, where it is I - J^T
  void *next, *basis;            // (n, D) the direction after it, (n, capacity, D)
  void *hessenberg, *rotation;   // (n, capacity, capacity + 1)
  void* null;                    // (n, capacity + 1)
  void *residual_norm, *matrix_norm;  // (n, 1)
  const void *limit, *beta;      // (n, 1)
  bool *running, *broken;        // (n, 1)
  int64_t *columns, *used;       // (n, 1)
  void* fork;
  int64_t threads, rows, size, capacity, step, of_one_minus;
  double floor, tiny;
};

// What is left of `rest` when its parts along the k vectors of the basis are gone; entries += the parts.
template <class T>
inline void orthogonal(const T* basis, T* rest, T* entries, int64_t k, int64_t size) {
  T parts[MOST_STEPS + 1];
  dots(basis, rest, k, size, parts);
  subtract(rest, parts, basis, k, size);
  for (int64_t j = 0; j < k; j++) entries[j] += parts[j];
}

// The small algebra of a column (k + 1,) of H; whether the sample goes on.
template <class T>
inline void extend(const Cycle& cycle, int64_t b, const T* column, T* null, T* rotation) {
  const int64_t k = cycle.step + 1;
  const T below = column[k];
  const T size = std::sqrt(dot(column, column, k + 1));
  T *left = static_cast<T*>(cycle.residual_norm) + b, *norm = static_cast<T*>(cycle.matrix_norm) + b;
  if (!(size <= std::numeric_limits<T>::max())) {
    cycle.running[b] = false;
    return;
  }
  *norm = std::fmax(*norm, size);
  cycle.broken[b] = below <= static_cast<T>(cycle.floor) * *norm;
  const T positive = below + static_cast<T>(cycle.tiny);
  const T projection = dot(null, column, k);
  const T pivot = std::hypot(projection, positive);
  const T cosine = projection / pivot, sine = positive / pivot;
  for (int64_t j = 0; j < k; j++) {
    rotation[j] = cosine * null[j];
    null[j] *= -sine;
  }
  rotation[k] = sine;
  null[k] = cosine;
  *left *= sine;
  cycle.columns[b]++;
  cycle.running[b] = *left > static_cast<const T*>(cycle.limit)[b] && !cycle.broken[b];
}

template <class T>
inline void absorb_of(const Cycle& cycle, int64_t b) {
  const int64_t size = cycle.size, k = cycle.step + 1, width = cycle.capacity + 1;
  T* basis = static_cast<T*>(cycle.basis) + b * cycle.capacity * size;
  const T* direction = static_cast<const T*>(cycle.direction) + b * size;
  const T* product = static_cast<const T*>(cycle.product) + b * size;
  T* rest = static_cast<T*>(cycle.next) + b * size;
  if (!cycle.running[b]) {
    for (int64_t i = 0; i < size; i++) rest[i] = direction[i];
    return;
  }
  const int64_t column_at = (b * cycle.capacity + cycle.step) * width;
  T* column = static_cast<T*>(cycle.hessenberg) + column_at;
  cycle.used[b]++;
  if (cycle.of_one_minus) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) rest[i] = direction[i] - product[i];
  } else {
    for (int64_t i = 0; i < size; i++) rest[i] = product[i];
  }
  for (int64_t j = 0; j < k; j++) column[j] = 0;
  orthogonal(basis, rest, column, k, size);
  orthogonal(basis, rest, column, k, size);
  const T below = std::sqrt(dot(rest, rest, size));
  column[k] = below;
  const T divisor = std::fmax(below, static_cast<T>(cycle.tiny));
  T* vector = basis + k * size;
  for (int64_t i = 0; i < size; i++) vector[i] = rest[i] = rest[i] / divisor;
  extend(cycle, b, column, static_cast<T*>(cycle.null) + b * width,
         static_cast<T*>(cycle.rotation) + column_at);
}

// How many samples go on.
template <class T>
int64_t absorb(const Cycle& cycle) {
  std::atomic<int64_t> running{0};
  const int64_t products = cycle.rows * cycle.size * (4 * (cycle.step + 1) + 3);
  over_rows(cycle.fork, cycle.threads, cycle.rows, products, [&](int64_t begin, int64_t end) {
    int64_t own = 0;
    for (int64_t b = begin; b < end; b++) {
      absorb_of<T>(cycle, b);
      own += cycle.running[b];
    }
    running += own;
  });
  return running;
}

// The end of a cycle: the solution (n, D), and its residual norm (n, 1), as GMRESRun.final has them.
template <class T>
inline void finish_of(const Cycle& cycle, T* solution, T* left, int64_t b) {
  const int64_t size = cycle.size, width = cycle.capacity + 1, k = cycle.columns[b];
  const T* basis = static_cast<const T*>(cycle.basis) + b * cycle.capacity * size;
  const T* entries = static_cast<const T*>(cycle.hessenberg) + b * cycle.capacity * width;
  const T* rotation = static_cast<const T*>(cycle.rotation) + b * cycle.capacity * width;
  const T beta = static_cast<const T*>(cycle.beta)[b];
  const T floor = static_cast<T>(cycle.floor) * static_cast<const T*>(cycle.matrix_norm)[b];
  T weights[MOST_STEPS];
  for (int64_t i = k - 1; i >= 0; i--) {
    const T* row = rotation + i * width;
    T sum = 0;
    for (int64_t j = i + 1; j < k; j++) sum += dot(row, entries + j * width, i + 2) * weights[j];
    const T diagonal = dot(row, entries + i * width, i + 2);
    const bool usable = std::fabs(diagonal) > floor;
    weights[i] = usable ? (beta * row[0] - sum) / diagonal : -sum;
  }
  for (int64_t i = 0; i < size; i++) solution[i] = 0;
  for (int64_t j = 0; j < k; j++) add(solution, weights[j], basis + j * size, size);
  *left = static_cast<const T*>(cycle.residual_norm)[b];
  if (!cycle.broken[b]) return;
  T squares = 0;
  for (int64_t l = 0; l <= k; l++) {
    T sum = l == 0 ? beta : T(0);
    for (int64_t j = l == 0 ? 0 : l - 1; j < k; j++) sum -= weights[j] * entries[j * width + l];
    squares += sum * sum;
  }
  *left = std::sqrt(squares);
}

template <class T>
void finish(const Cycle& cycle, void* solution, void* left) {
  const int64_t size = cycle.size;
  over_rows(cycle.fork, cycle.threads, cycle.rows, cycle.rows * size * cycle.step,
            [&](int64_t begin, int64_t end) {
              for (int64_t b = begin; b < end; b++)
                finish_of(cycle, static_cast<T*>(solution) + b * size, static_cast<T*>(left) + b, b);
            });
}

}  // namespace
