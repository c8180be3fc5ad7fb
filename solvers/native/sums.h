// Sums and small systems of one sample, and samples shared by threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <utility>

#include "threads.h"

namespace {

constexpr int64_t CHUNK = 1024;  // terms of a sum that are added in T; chunks are added in double

// part(first, last) for all chunks of [0, n).
template <class Part>
inline void over_chunks(int64_t n, Part part) {
  for (int64_t first = 0; first < n; first += CHUNK) part(first, first + CHUNK < n ? first + CHUNK : n);
}

template <class T>
inline T dot(const T* a, const T* b, int64_t n) {
  double total = 0;
  over_chunks(n, [&](int64_t first, int64_t last) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; i++) sum += a[i] * b[i];
    total += sum;
  });
  return static_cast<T>(total);
}

// Products of four vectors, n apart, with x: one alone would wait for its own sum.
template <class T>
inline void four_dots(const T* vectors, const T* x, int64_t n, T* products) {
  const T *a = vectors, *b = a + n, *c = b + n, *d = c + n;
  double with_a = 0, with_b = 0, with_c = 0, with_d = 0;
  over_chunks(n, [&](int64_t first, int64_t last) {
    T one = 0, two = 0, three = 0, four = 0;
#pragma omp simd reduction(+ : one, two, three, four)
    for (int64_t i = first; i < last; i++) {
      one += a[i] * x[i];
      two += b[i] * x[i];
      three += c[i] * x[i];
      four += d[i] * x[i];
    }
    with_a += one;
    with_b += two;
    with_c += three;
    with_d += four;
  });
  products[0] = static_cast<T>(with_a);
  products[1] = static_cast<T>(with_b);
  products[2] = static_cast<T>(with_c);
  products[3] = static_cast<T>(with_d);
}

// Products of k vectors, n apart, with x.
template <class T>
inline void dots(const T* vectors, const T* x, int64_t k, int64_t n, T* products) {
  int64_t j = 0;
  for (; j + 4 <= k; j += 4) four_dots(vectors + j * n, x, n, products + j);
  for (; j < k; j++) products[j] = dot(vectors + j * n, x, n);
}

template <class T>
inline void add(T* a, T factor, const T* b, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) a[i] += factor * b[i];
}

// a -= the sum of k vectors, n apart, times their weights.
template <class T>
inline void subtract(T* a, const T* weights, const T* vectors, int64_t k, int64_t n) {
  int64_t j = 0;
  for (; j + 4 <= k; j += 4) {
    const T *b = vectors + j * n, *c = b + n, *d = c + n, *e = d + n;
    const T w = -weights[j], x = -weights[j + 1], y = -weights[j + 2], z = -weights[j + 3];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) a[i] = a[i] + w * b[i] + x * c[i] + y * d[i] + z * e[i];
  }
  for (; j < k; j++) add(a, -weights[j], vectors + j * n, n);
}

// x of (k, k) A x = b, rows of A `width` apart, by elimination with row exchanges; A and b are lost.
template <class T>
inline void solve(T* a, T* x, int64_t k, int64_t width) {
  for (int64_t j = 0; j < k; j++) {
    int64_t pivot = j;
    for (int64_t i = j + 1; i < k; i++)
      if (std::fabs(a[i * width + j]) > std::fabs(a[pivot * width + j])) pivot = i;
    if (pivot != j) {
      for (int64_t l = j; l < k; l++) std::swap(a[j * width + l], a[pivot * width + l]);
      std::swap(x[j], x[pivot]);
    }
    const T inverse = 1 / a[j * width + j];
    for (int64_t i = j + 1; i < k; i++) {
      const T factor = a[i * width + j] * inverse;
      add(a + i * width + j, -factor, a + j * width + j, k - j);
      x[i] -= factor * x[j];
    }
  }
  for (int64_t i = k - 1; i >= 0; i--) {
    T sum = x[i];
    for (int64_t j = i + 1; j < k; j++) sum -= a[i * width + j] * x[j];
    x[i] = sum / a[i * width + i];
  }
}

// rows(first, last) for all of `batch` rows, by so many threads as the work is worth.
template <class Work>
void over_rows(void* fork, int64_t threads, int64_t batch, int64_t products, Work rows) {
  constexpr int64_t WORTH_A_THREAD = 1 << 17;
  int64_t slots = products / WORTH_A_THREAD + 1;
  slots = slots < threads ? slots : threads;
  slots = slots < batch ? slots : batch;
  slots = slots < MOST_THREADS ? slots : MOST_THREADS;
  if (slots <= 1) return rows(int64_t{0}, batch);
  in_parallel(reinterpret_cast<Fork>(fork), static_cast<int>(slots),
              [&](int slot) { rows(batch * slot / slots, batch * (slot + 1) / slots); });
}

}  // namespace
