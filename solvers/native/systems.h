// Linear systems A u = g, A = I - M or A itself, by cycles of GMRES or conjugate gradients, each sample for itself.
// The same decisions in torch: solvers/linear.py; the methods: solvers/krylov.py.
#pragma once
#include "turns.h"

namespace {

// Arrays are (B,) or as said. What the caller multiplies stands in `direction`.
struct Systems {
  const void *right, *product;    // (B, D) g; the product of A, or of M, with the direction
  void *direction, *u, *residual, *correction;  // (B, D) u: the best verified iterate, and its residual
  void *reference, *norm, *target;  // |g|; the residual norm of u; what the cycle aims at
  void *left, *matrix_norm;       // the cycle's own residual norm; the largest lower bound of |A| seen
  void *basis, *hessenberg, *rotation, *null, *beta;  // GMRES: (B, m, D), (B, m, m + 1) twice, (B, m + 1), (B,)
  void *iterate, *square, *best_square, *curvature;  // CG; iterate (B, D), null: GMRES
  int64_t *status, *steps, *products, *used, *columns, *verdict;
  bool *running, *broken;
  void* fork;
  int64_t threads, rows, size, capacity, step, max_steps, one_minus;
  double rtol, atol, moderate, gap, halved, less, reserve, floor, tiny;
};
constexpr int64_t IMMODERATE = -1;

template <class T>
inline T limit_of(const Systems& all, int64_t b) {
  return std::fmax(*of<T>(all.reference, b) * static_cast<T>(all.rtol), static_cast<T>(all.atol));
}

// A times the direction of sample b, to `result`.
template <class T>
inline void product_of(const Systems& all, int64_t b, T* result) {
  const T *direction = of<T>(all.direction, b * all.size), *product = of<T>(all.product, b * all.size);
  if (all.one_minus) {
#pragma omp simd
    for (int64_t i = 0; i < all.size; i++) result[i] = direction[i] - product[i];
  } else {
    std::copy(product, product + all.size, result);
  }
}

// A cycle of sample b begins at its residual; one that has ended multiplies zeros.
template <class T>
inline void start_cycle(const Systems& all, int64_t b) {
  const int64_t size = all.size;
  const T norm = *of<T>(all.norm, b);
  const T* residual = of<T>(all.residual, b * size);
  T* direction = of<T>(all.direction, b * size);
  all.running[b] = all.status[b] == RUNNING;
  all.used[b] = all.columns[b] = 0;
  if (!all.running[b]) return (void)std::fill(direction, direction + size, T(0));
  *of<T>(all.left, b) = norm;
  all.broken[b] = false;
  T* correction = of<T>(all.correction, b * size);
  if (all.iterate) {
    T* iterate = of<T>(all.iterate, b * size);
    std::copy(residual, residual + size, direction);
    std::fill(iterate, iterate + size, T(0));
    *of<T>(all.square, b) = *of<T>(all.best_square, b) = norm * norm;
    *of<T>(all.curvature, b) = 1;
    std::fill(correction, correction + size, T(0));
    return;
  }
  T* vector = of<T>(all.basis, b * all.capacity * size);
  for (int64_t i = 0; i < size; i++) vector[i] = direction[i] = residual[i] / norm;
  T* null = of<T>(all.null, b * (all.capacity + 1));
  std::fill(null, null + all.capacity + 1, T(0));
  null[0] = 1;
  *of<T>(all.beta, b) = norm;
}

// What is left of `rest` when its parts along the k vectors of the basis are gone; entries += the parts.
template <class T>
inline void orthogonal(const T* basis, T* rest, T* entries, int64_t k, int64_t size) {
  T parts[MOST + 1];
  dots(basis, rest, k, size, parts);
  subtract(rest, parts, basis, k, size);
  for (int64_t j = 0; j < k; j++) entries[j] += parts[j];
}

// A step of GMRES: a further column (k + 1,) of H, made triangular by a rotation.
template <class T>
inline void gmres_of(const Systems& all, int64_t b) {
  const int64_t size = all.size, k = all.step + 1, width = all.capacity + 1;
  T *basis = of<T>(all.basis, b * all.capacity * size), *rest = of<T>(all.direction, b * size);
  T* column = of<T>(all.hessenberg, (b * all.capacity + all.step) * width);
  T* rotation = of<T>(all.rotation, (b * all.capacity + all.step) * width);
  T *null = of<T>(all.null, b * width), *left = of<T>(all.left, b), *norm = of<T>(all.matrix_norm, b);
  product_of(all, b, rest);
  std::fill(column, column + k, T(0));
  orthogonal(basis, rest, column, k, size);
  orthogonal(basis, rest, column, k, size);
  const T below = column[k] = std::sqrt(dot(rest, rest, size));
  const T length = std::sqrt(dot(column, column, k + 1));
  if (!std::isfinite(length)) return (void)(all.running[b] = false);
  const T divisor = std::fmax(below, static_cast<T>(all.tiny));
  T* vector = basis + k * size;
  for (int64_t i = 0; i < size; i++) vector[i] = rest[i] = rest[i] / divisor;
  *norm = std::fmax(*norm, length);
  all.broken[b] = below <= static_cast<T>(all.floor) * *norm;
  const T positive = below + static_cast<T>(all.tiny), projection = dot(null, column, k);
  const T pivot = std::hypot(projection, positive);
  const T cosine = projection / pivot, sine = positive / pivot;
  for (int64_t j = 0; j < k; j++) {
    rotation[j] = cosine * null[j];
    null[j] *= -sine;
  }
  rotation[k] = sine;
  null[k] = cosine;
  *left *= sine;
  all.columns[b]++;
  all.running[b] = *left > *of<T>(all.target, b) && !all.broken[b];
}

// A step of conjugate gradients; the residual of the recurrence replaces that of u, which is computed anew.
template <class T>
inline void conjugate_of(const Systems& all, int64_t b) {
  const int64_t size = all.size;
  T *direction = of<T>(all.direction, b * size), *r = of<T>(all.residual, b * size);
  T *iterate = of<T>(all.iterate, b * size), *best = of<T>(all.correction, b * size);
  T *square = of<T>(all.square, b), *best_square = of<T>(all.best_square, b);
  const T* image = of<T>(all.product, b * size);
  const T own = all.one_minus ? T(1) : T(0), sign = all.one_minus ? T(-1) : T(1);  // A d = own d + sign image
  double bend = 0;
  over_chunks(size, [&](int64_t first, int64_t last) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; i++) sum += direction[i] * (own * direction[i] + sign * image[i]);
    bend += sum;
  });
  const T curvature = static_cast<T>(bend);
  *of<T>(all.curvature, b) = curvature;
  all.running[b] = false;
  if (!(curvature > 0)) return;
  // 1 / alpha never exceeds a diagonal entry of the Lanczos matrix, hence never |A|.
  const T inverse = curvature / *square, alpha = 1 / inverse;
  *of<T>(all.matrix_norm, b) = std::fmax(*of<T>(all.matrix_norm, b), inverse);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    iterate[i] += alpha * direction[i];
    r[i] -= alpha * (own * direction[i] + sign * image[i]);
  }
  const T after = dot(r, r, size), beta = after / *square;
  if (after < *best_square) {
    std::copy(iterate, iterate + size, best);
    *best_square = after;
    *of<T>(all.left, b) = std::sqrt(after);
  }
#pragma omp simd
  for (int64_t i = 0; i < size; i++) direction[i] = r[i] + beta * direction[i];
  *square = after;
  const T target = *of<T>(all.target, b);
  all.running[b] = after > target * target;
}

// The correction of a cycle of GMRES, and its residual norm.
template <class T>
inline T combined(const Systems& all, int64_t b) {
  const int64_t size = all.size, width = all.capacity + 1, k = all.columns[b];
  const T* basis = of<T>(all.basis, b * all.capacity * size);
  const T* entries = of<T>(all.hessenberg, b * all.capacity * width);
  const T* rotation = of<T>(all.rotation, b * all.capacity * width);
  T* correction = of<T>(all.correction, b * size);
  const T beta = *of<T>(all.beta, b), floor = static_cast<T>(all.floor) * *of<T>(all.matrix_norm, b);
  T weights[MOST];
  for (int64_t i = k - 1; i >= 0; i--) {
    const T* row = rotation + i * width;
    T sum = 0;
    for (int64_t j = i + 1; j < k; j++) sum += dot(row, entries + j * width, i + 2) * weights[j];
    const T diagonal = dot(row, entries + i * width, i + 2);
    weights[i] = std::fabs(diagonal) > floor ? (beta * row[0] - sum) / diagonal : -sum;
  }
  std::fill(correction, correction + size, T(0));
  for (int64_t j = 0; j < k; j++) add(correction, weights[j], basis + j * size, size);
  if (!all.broken[b]) return *of<T>(all.left, b);
  T squares = 0;
  for (int64_t l = 0; l <= k; l++) {
    T sum = l == 0 ? beta : T(0);
    for (int64_t j = l == 0 ? 0 : l - 1; j < k; j++) sum -= weights[j] * entries[j * width + l];
    squares += sum * sum;
  }
  return std::sqrt(squares);
}

// What the cycle says of sample b.
template <class T>
struct Account {
  T left, gap;                    // its residual norm, and what rounding may have done to it
  int64_t verdict;
};

template <class T>
inline Account<T> account_of(const Systems& all, int64_t b) {
  const int64_t size = all.size;
  const T left = all.iterate ? *of<T>(all.left, b) : combined<T>(all, b);
  const T *u = of<T>(all.u, b * size), *correction = of<T>(all.correction, b * size);
  double before = 0, after = 0;
  for (int64_t i = 0; i < size; i++) {
    const double x = static_cast<double>(u[i]) + correction[i];
    before += static_cast<double>(u[i]) * u[i];
    after += x * x;
  }
  const T length = static_cast<T>(std::sqrt(std::fmax(before, after)));
  const T gap = static_cast<T>(all.gap) * (*of<T>(all.matrix_norm, b) * length + *of<T>(all.reference, b));
  const T target = *of<T>(all.target, b);
  if (!all.iterate) {
    int64_t verdict = all.broken[b] ? STALLED : MAX_STEPS;
    if (all.columns[b] < all.used[b]) verdict = NONFINITE;
    return {left, gap, *of<T>(all.left, b) <= target ? CONVERGED : verdict};
  }
  const T curvature = *of<T>(all.curvature, b), best = *of<T>(all.best_square, b);
  const T rounding = std::numeric_limits<T>::epsilon() * *of<T>(all.norm, b);
  int64_t verdict = curvature > 0 ? MAX_STEPS : best <= rounding * rounding ? STALLED : INDEFINITE;
  if (!std::isfinite(curvature) || !std::isfinite(*of<T>(all.square, b))) verdict = NONFINITE;
  return {left, gap, best <= target * target ? CONVERGED : verdict};
}

template <class Each>
int64_t over_samples(const Systems& all, int64_t work, Each each) {
  std::atomic<int64_t> total{0};
  over_rows(all.fork, all.threads, all.rows, all.rows * all.size * work, [&](int64_t first, int64_t last) {
    int64_t own = 0;
    for (int64_t b = first; b < last; b++) own += each(b);
    total += own;
  });
  return total;
}

// u = 0 and the first cycle. How many samples run; IMMODERATE where a norm's square may be out of range.
template <class T>
int64_t begin(const Systems& all) {
  std::atomic<bool> moderate{true};
  const int64_t open = over_samples(all, 4, [&](int64_t b) {
    const int64_t size = all.size;
    const T* right = of<T>(all.right, b * size);
    const T norm = std::sqrt(dot(right, right, size)), most = static_cast<T>(all.moderate);
    bool zero = true;  // a norm of 0 may be a square that is too small for a number
    for (int64_t i = 0; i < size; i++) zero &= right[i] == 0;
    if (!(zero || (norm > 1 / most && norm < most))) moderate = false;  // so for NaN
    T* u = of<T>(all.u, b * size);
    std::fill(u, u + size, T(0));
    std::copy(right, right + size, of<T>(all.residual, b * size));
    *of<T>(all.reference, b) = *of<T>(all.norm, b) = norm;
    *of<T>(all.target, b) = limit_of<T>(all, b);
    *of<T>(all.matrix_norm, b) = 0;
    all.steps[b] = all.products[b] = 0;
    all.status[b] = norm <= limit_of<T>(all, b) ? CONVERGED : RUNNING;
    start_cycle<T>(all, b);
    return all.running[b];
  });
  return moderate ? open : IMMODERATE;
}

// A step by the product with the direction. How many samples go on.
template <class T>
int64_t advance(const Systems& all) {
  return over_samples(all, all.iterate ? 8 : 4 * all.step + 7, [&](int64_t b) -> int64_t {
    if (!all.running[b]) return 0;
    all.used[b]++;
    all.iterate ? conjugate_of<T>(all, b) : gmres_of<T>(all, b);
    if (all.running[b] && all.products[b] + all.used[b] >= all.max_steps - 1) {
      // The last product is kept, where it will be needed to verify the residual.
      const Account<T> own = account_of<T>(all, b);
      const T enough = std::fmax(static_cast<T>(all.reserve) * own.left, limit_of<T>(all, b) / 2);
      all.running[b] = all.products[b] + all.used[b] < all.max_steps && own.gap <= enough;
    }
    return all.running[b];
  });
}

// The end of a cycle: who is done by its own account, and who needs a product to verify it, with u plus the
// correction, which is made the direction. How many do.
template <class T>
int64_t settle(const Systems& all) {
  return over_samples(all, all.step + 4, [&](int64_t b) -> int64_t {
    const int64_t size = all.size;
    T* direction = of<T>(all.direction, b * size);
    if (all.status[b] != RUNNING) return 0;
    const auto [left, gap, verdict] = account_of<T>(all, b);
    const T limit = limit_of<T>(all, b);
    T *u = of<T>(all.u, b * size), *norm = of<T>(all.norm, b), *correction = of<T>(all.correction, b * size);
    all.steps[b] += all.used[b];
    all.products[b] += all.used[b];
    const bool claimed = verdict == CONVERGED;
    const bool accurate = gap <= std::fmax(left, limit) || left == *norm;
    const bool spent = all.products[b] >= all.max_steps || all.used[b] == 0;
    if (!spent && !(accurate && verdict != MAX_STEPS)) {
      for (int64_t i = 0; i < size; i++) direction[i] = correction[i] += u[i];
      all.products[b]++;
      all.verdict[b] = verdict;
      return 1;
    }
    if (accurate && left < *norm) {
      add(u, T(1), correction, size);
      *norm = left;
    }
    all.status[b] = !claimed ? verdict : !accurate ? MAX_STEPS : *norm > limit ? STALLED : CONVERGED;
    std::fill(direction, direction + size, T(0));
    return 0;
  });
}

// The true residuals of those that were to be verified, by the product with their direction, and the next
// cycle. How many go on.
template <class T>
int64_t verify(const Systems& all) {
  return over_samples(all, 4, [&](int64_t b) -> int64_t {
    if (all.status[b] != RUNNING) return start_cycle<T>(all, b), 0;
    const int64_t size = all.size;
    const int64_t verdict = all.verdict[b];
    T *r = of<T>(all.residual, b * size), *norm = of<T>(all.norm, b), *target = of<T>(all.target, b);
    const T *right = of<T>(all.right, b * size), *x = of<T>(all.correction, b * size);
    product_of(all, b, of<T>(all.direction, b * size));
    const T* image = of<T>(all.direction, b * size);
    double squares = 0;
    for (int64_t i = 0; i < size; i++) {
      const T rest = right[i] - image[i];
      squares += static_cast<double>(rest) * rest;
    }
    const T after = static_cast<T>(std::sqrt(squares)), limit = limit_of<T>(all, b);
    const bool claimed = verdict == CONVERGED, within = after <= limit;
    // An iterate that is better by no more than rounding may be worse in every other way.
    const bool better = within || after < static_cast<T>(all.less) * *norm;
    const bool gained = better && (after <= static_cast<T>(all.halved) * *norm || !claimed);
    if (better) {
      std::copy(x, x + size, of<T>(all.u, b * size));
      *norm = after;
    }
    if (claimed) *target = static_cast<T>(all.halved) * limit;
    if (within) all.status[b] = CONVERGED;
    else if (!std::isfinite(after)) all.status[b] = NONFINITE;
    else if (!claimed && verdict != MAX_STEPS) all.status[b] = verdict;
    else if (!gained) all.status[b] = STALLED;
    else if (all.products[b] >= all.max_steps) all.status[b] = MAX_STEPS;
    for (int64_t i = 0; i < size; i++) r[i] = right[i] - image[i];
    start_cycle<T>(all, b);
    return all.running[b];
  });
}

}  // namespace
