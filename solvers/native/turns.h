// Turns of a solve z = f(z) by Anderson's method or by plain steps: every row is judged and makes its step. The
// same decisions in torch: solvers/core/judge.py and loop.py; the same step: solvers/methods/anderson.py.
#pragma once
#include <limits>
#include <vector>

#include "sums.h"

namespace {

constexpr int64_t MOST = 64;  // differences that are kept of a sample, as solvers/native/__init__.py knows
constexpr int64_t RUNNING = -1, CONVERGED = 0, MAX_STEPS = 1, STALLED = 2, DIVERGED = 3, NONFINITE = 4;
constexpr int64_t MAX_REJECTIONS = 40;

// A solve. Arrays are of all B samples, whose rows n of the batch may be fewer: `index` says which. A sample has
// `parts` L of the given sizes, which are judged one by one, see solvers/core/judge.py.
struct Turns {
  const void *trial, *value;      // (n, D) where f was evaluated, and f there
  void* next;                     // (n, D) where it is to be evaluated next
  const int64_t *index, *sizes;   // (n,) samples of the rows; (L,) numbers of the parts
  const bool* mask;               // (B, D) or null
  void *z, *residual;             // (B, D) the point accepted last
  void *steps, *changes, *gram;   // (B, kept, D) twice, (B, kept, kept): differences, as a ring
  void* best;                     // (B, D)
  void *score, *relative, *norm, *error;         // (B,) of the best iterate
  void *limit, *bound, *scale, *milestone, *path;  // (B,) as Rows has them
  void *norms, *caps, *gains;     // (B, L) twice, (B, L, remembered)
  void* anchor;                   // (B, D), or null where no sample can stall
  // (B,) A sample begins where it is RUNNING after 0 evaluations: what else is kept of it does not count then.
  int64_t *status, *evaluations, *rejected, *rejections, *count;
  void* fork;
  int64_t threads, rows, size, kept, max_steps, patience, parts, remembered;
  double rtol, atol, damping, ridge, tiny, divergence, moderate, eps, fallen, roundings, progress, drift;
};

template <class T>
inline T* of(void* array, int64_t at) {
  return static_cast<T*>(array) + at;
}
template <class T>
inline const T* of(const void* array, int64_t at) {
  return static_cast<const T*>(array) + at;
}

// Store the newest difference of sample b, at z with this residual; return how many are stored.
template <class T>
inline int64_t store(const Turns& all, int64_t b, const T* z, const T* residual, T moved) {
  const int64_t size = all.size, kept = all.kept, slot = all.count[b] % kept;
  const int64_t filled = ++all.count[b] < kept ? all.count[b] : kept;
  const T damping = static_cast<T>(all.damping), ridge = static_cast<T>(all.ridge);
  const T *z_before = of<T>(all.z, b * size), *residual_before = of<T>(all.residual, b * size);
  T *steps = of<T>(all.steps, b * kept * size), *changes = of<T>(all.changes, b * kept * size);
  T *gram = of<T>(all.gram, b * kept * kept), *step = steps + slot * size, *change = changes + slot * size;
  T row[MOST];
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const T difference = residual[i] - residual_before[i];
    change[i] = difference;
    step[i] = z[i] - z_before[i] + damping * difference;
  }
  dots(changes, change, filled, size, row);
  // A difference of zero gets the weight zero.
  row[slot] = row[slot] * (1 + ridge) + ridge * moved * moved + static_cast<T>(all.tiny);
  for (int64_t j = 0; j < filled; j++) gram[slot * kept + j] = gram[j * kept + slot] = row[j];
  return filled;
}

// How far the gain of a combination of the stored steps exceeds that of any of them: span_factor in judge.py.
template <class T>
inline T span_factor(const Turns& all, int64_t b, int64_t filled) {
  constexpr double RESOLUTION = 1e-6;  // as in judge.py
  const int64_t size = all.size, kept = all.kept, m = filled;
  const T damping = static_cast<T>(all.damping);
  const T *steps = of<T>(all.steps, b * kept * size), *changes = of<T>(all.changes, b * kept * size);
  const T* gram = of<T>(all.gram, b * kept * kept);
  std::vector<T> moves(m * size);
  for (int64_t i = 0; i < m * size; i++) moves[i] = steps[i] - damping * changes[i];
  std::vector<double> numbers(4 * m * m), unit(m);
  double *own = numbers.data(), *root = own + m * m, *power = root + m * m, *squared = power + m * m;
  for (int64_t i = 0; i < m; i++) {
    // The diagonal of the Gram matrix is that of the regularised system.
    const double square = dot(changes + i * size, changes + i * size, size);
    unit[i] = square > 0 ? 1 / std::sqrt(square) : 0;
  }
  double single = 0;
  for (int64_t i = 0; i < m; i++) {
    T row[MOST];
    dots(moves.data(), moves.data() + i * size, i + 1, size, row);
    for (int64_t j = 0; j <= i; j++) {
      own[i * m + j] = own[j * m + i] = unit[i] * unit[j] * row[j];
      root[i * m + j] = unit[i] * unit[j] * gram[i * kept + j];
    }
    root[i * m + i] = 1 + RESOLUTION;
    single = std::fmax(single, own[i * m + i]);
  }
  for (int64_t i = 0; i < m; i++)  // Cholesky's factor, in place
    for (int64_t j = 0; j <= i; j++) {
      double rest = root[i * m + j];
      for (int64_t k = 0; k < j; k++) rest -= root[i * m + k] * root[j * m + k];
      root[i * m + j] = i == j ? std::sqrt(rest) : rest / root[j * m + j];
    }
  for (int turn = 0; turn < 2; turn++) {  // own = root^-1 own root^-T, one side after the other
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        double rest = own[i * m + j];
        for (int64_t k = 0; k < i; k++) rest -= root[i * m + k] * squared[k * m + j];
        squared[i * m + j] = rest / root[i * m + i];
      }
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) own[i * m + j] = squared[j * m + i];
  }
  // The largest eigenvalue of the ratio: a column of its power is near the eigenvector.
  std::copy(own, own + m * m, power);
  for (int turn = 0; turn < 5; turn++) {
    double trace = 0;
    for (int64_t i = 0; i < m; i++) trace += power[i * m + i];
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < m; j++) {
        double sum = 0;
        for (int64_t k = 0; k < m; k++) sum += power[i * m + k] * power[k * m + j];
        squared[i * m + j] = sum / (trace * trace);
      }
    std::swap(power, squared);
  }
  int64_t most = 0;
  for (int64_t i = 1; i < m; i++)
    if (power[i * m + i] > power[most * m + most]) most = i;
  double above = 0, below = 0;
  for (int64_t i = 0; i < m; i++) {
    double sum = 0;
    for (int64_t k = 0; k < m; k++) sum += own[i * m + k] * power[k * m + most];
    above += sum * power[i * m + most];
    below += power[i * m + most] * power[i * m + most];
  }
  const double factor = std::sqrt(above / below / single);
  return std::isfinite(factor) ? static_cast<T>(std::fmax(factor, 1.0)) : T(1);
}

// The step of sample b from z with this residual, which stands in `next` and is replaced by the next point. The
// newest difference may have been stored before: then `filled` are there.
template <class T>
inline void anderson(const Turns& all, int64_t b, const T* z, T moved, int64_t filled, T* next) {
  const int64_t size = all.size, kept = all.kept;
  const T damping = static_cast<T>(all.damping);
  T *z_before = of<T>(all.z, b * size), *residual_before = of<T>(all.residual, b * size);
  T weights[MOST];
  T* steps = of<T>(all.steps, b * kept * size);
  if (kept > 0 && all.evaluations[b] > 1) {
    T system[MOST * MOST];
    const T *changes = of<T>(all.changes, b * kept * size), *gram = of<T>(all.gram, b * kept * kept);
    filled = filled ? filled : store(all, b, z, next, moved);
    dots(changes, next, filled, size, weights);
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
  T residual, value, moved, changed;
};

// f(z) - z of a part, and the norms of it, of f, and of the differences to the last accepted point (`z_before`, null
// if there is none); masked coordinates are zero in all of them.
template <class T>
inline Norms<T> residual_of(const T* z, const T* f, const bool* mask, const T* z_before, const T* residual_before,
                            T* residual, int64_t size, T moderate) {
  double rest = 0, whole = 0, move = 0, change = 0;
  over_chunks(size, [&](int64_t first, int64_t last) {
    T rest_squares = 0, squares = 0, moves = 0, changes = 0;
#pragma omp simd reduction(+ : rest_squares, squares)
    for (int64_t i = first; i < last; i++) {
      const bool free = !mask || mask[i];
      const T value = free ? f[i] : T(0), difference = free ? f[i] - z[i] : T(0);
      residual[i] = difference;
      rest_squares += difference * difference;
      squares += value * value;
    }
    if (z_before) {
#pragma omp simd reduction(+ : moves, changes)
      for (int64_t i = first; i < last; i++) {
        const T moved = z[i] - z_before[i], changed = residual[i] - residual_before[i];
        moves += moved * moved;
        changes += changed * changed;
      }
    }
    rest += rest_squares;
    whole += squares;
    move += moves;
    change += changes;
  });
  Norms<T> norms{static_cast<T>(std::sqrt(rest)), static_cast<T>(std::sqrt(whole)), static_cast<T>(std::sqrt(move)),
                 static_cast<T>(std::sqrt(change))};
  const auto fits = [&](T norm) { return norm > moderate && std::isfinite(norm); };  // no square did any harm
  if (!(fits(norms.value) && std::isfinite(norms.residual))) {
    norms.residual = exact_norm<T>(size, [&](int64_t i) { return residual[i]; });
    norms.value = exact_norm<T>(size, [&](int64_t i) { return !mask || mask[i] ? f[i] : T(0); });
  }
  if (z_before && !fits(norms.moved)) norms.moved = exact_norm<T>(size, [&](int64_t i) { return z[i] - z_before[i]; });
  if (z_before && !fits(norms.changed))
    norms.changed = exact_norm<T>(size, [&](int64_t i) { return residual[i] - residual_before[i]; });
  return norms;
}

// Whether a row that rejects its trial has failed; RUNNING where it has not.
template <class T>
inline int64_t given_up(const Turns& all, int64_t b, T norm, bool finite) {
  const int64_t rejections = all.rejections[b];
  if (rejections > 0 && norm > *of<T>(all.limit, b)) return DIVERGED;
  if (rejections < (all.evaluations[b] > 1 ? MAX_REJECTIONS : 0)) return RUNNING;
  return finite ? STALLED : NONFINITE;
}

template <class T>
inline T length(T a, T b) {  // of the vector (a, b); exact where one of them is zero
  return a == 0 ? b : b == 0 ? a : static_cast<T>(std::hypot(static_cast<double>(a), static_cast<double>(b)));
}

constexpr int64_t MOST_PARTS = 64;

template <class T>
inline void turn_of(const Turns& all, int64_t row, int64_t b) {
  const int64_t size = all.size, parts = all.parts, remembered = all.remembered;
  const T *trial = of<T>(all.trial, row * size), *value = of<T>(all.value, row * size);
  T *next = of<T>(all.next, row * size), *best = of<T>(all.best, b * size);
  T *best_score = of<T>(all.score, b), *limit = of<T>(all.limit, b), *scale = of<T>(all.scale, b);
  T *milestone = of<T>(all.milestone, b), *path = of<T>(all.path, b), *bound = of<T>(all.bound, b);
  T *norms_before = of<T>(all.norms, b * parts), *caps = of<T>(all.caps, b * parts);
  T* gains = of<T>(all.gains, b * parts * remembered);
  T *z = of<T>(all.z, b * size), *residual = of<T>(all.residual, b * size);
  const int64_t evaluation = ++all.evaluations[b];
  const bool first = evaluation == 1;
  constexpr T most = std::numeric_limits<T>::max(), none = std::numeric_limits<T>::infinity();
  constexpr T least = std::numeric_limits<T>::min();
  const T rtol = static_cast<T>(all.rtol), atol = static_cast<T>(all.atol), eps = static_cast<T>(all.eps);
  const T moderate = static_cast<T>(all.moderate), fallen = static_cast<T>(all.fallen);
  Norms<T> part[MOST_PARTS];
  T norm = 0, reference = 0, moved = 0;
  for (int64_t l = 0, at = 0; l < parts; at += all.sizes[l++]) {
    const bool* mask = all.mask ? all.mask + b * size + at : nullptr;
    part[l] = residual_of(trial + at, value + at, mask, first ? nullptr : z + at, first ? nullptr : residual + at,
                          next + at, all.sizes[l], moderate);
    norm = length(norm, part[l].residual);
    reference = length(reference, part[l].value);
    moved = length(moved, part[l].moved);
    if (first) {
      const T extent = part[l].value + part[l].residual;
      caps[l] = std::fmax(std::fmax(std::fmax(rtol * extent, atol), 10 * eps * extent), fallen * part[l].residual);
      for (int64_t j = 0; j < remembered; j++) gains[l * remembered + j] = 0;
    }
  }
  const bool finite = std::isfinite(norm + reference);
  if (first) {
    *limit = static_cast<T>(all.divergence) * std::fmax(norm, reference);
    *best_score = *of<T>(all.norm, b) = *of<T>(all.relative, b) = *of<T>(all.error, b) = *milestone = none;
    *scale = 1;
    *path = 0;
    all.rejected[b] = all.rejections[b] = all.count[b] = 0;
    std::copy(trial, trial + size, best);
  }
  const bool guarded = all.kept > 0 && evaluation > 2 && all.rejections[b] == 0;
  const bool accepted = finite && (first || norm <= *limit) && (!guarded || norm <= *bound);
  // The score of the trial, its relative residual and error, and whether it has converged.
  T score = 0, relative = 0, error = 0, room = none;
  bool converged = accepted;
  for (int64_t l = 0; l < parts; l++) {
    const Norms<T>& own = part[l];
    T *known = gains + l * remembered, largest = 0;
    const T start = *limit / static_cast<T>(all.divergence);  // the size of the whole start
    if (accepted) caps[l] = std::fmax(caps[l], fallen * std::fmin(own.residual, start));
    if (accepted && !first && own.moved > eps * own.value) {  // not only by rounding
      const T fallen = norms_before[l] - own.residual;
      const bool plain = (all.kept == 0 || all.rejections[b] > 0) && fallen > 0;  // whose rate counts
      known[evaluation % remembered] = own.moved / (plain ? fallen : own.changed);
      *path += own.moved;
    }
    int64_t steps_known = 0;
    for (int64_t j = 0; j < remembered; j++) largest = std::fmax(largest, known[j]), steps_known += known[j] > 0;
    const T wrong = own.residual == 0 ? 0 : steps_known < 2 ? none : own.residual * largest;
    const T threshold = std::fmax(own.value * rtol, atol), allowed = std::fmin(threshold, caps[l]);
    const T scaled = std::fmin(own.value, *limit);  // a runaway is no scale
    const T close = std::fmax(scaled * rtol, atol);
    const T rounding = static_cast<T>(all.roundings) * eps * scaled;
    const bool rounded = own.residual <= rounding && rounding <= caps[l];
    const bool near = wrong <= close || rounded;
    if (!rounded) room = std::fmin(room, close / wrong);
    converged = converged && near && eps * own.value <= caps[l] && own.residual <= allowed;
    const T size_of = own.value > 0 ? own.value : least;
    score = std::fmax(score, std::fmin(own.residual / (allowed > 0 ? allowed : least), most));
    relative = std::fmax(relative, std::fmin(own.residual / size_of, most));
    error = std::fmax(error, wrong < none ? std::fmin(wrong / size_of, most) : none);
    if (accepted) norms_before[l] = own.residual;
  }
  if (accepted) *bound = norm;
  int64_t filled = 0;  // stored differences, once the newest one is among them
  if (converged && all.kept > 0 && evaluation > remembered) {
    filled = store(all, b, trial, next, moved);
    const T factor = span_factor<T>(all, b, filled);
    converged = factor <= room;
    error = std::fmin(error * factor, most);
  }
  if (converged || (accepted && score < *best_score)) {
    std::copy(trial, trial + size, best);
    *best_score = score;
    *of<T>(all.relative, b) = relative;
    *of<T>(all.norm, b) = norm;
    *of<T>(all.error, b) = error;
  }
  int64_t status = converged ? CONVERGED : accepted ? RUNNING : given_up<T>(all, b, norm, finite);
  if (!accepted) all.rejected[b]++;
  if (status == RUNNING && evaluation >= all.max_steps) status = MAX_STEPS;
  if (all.anchor && evaluation % all.patience == 0) {
    T* anchor = of<T>(all.anchor, b * size);
    const T* here = accepted ? trial : z;
    bool stuck = *best_score > static_cast<T>(1 - all.progress) * *milestone;
    if (stuck) {  // unless the sample keeps to a direction
      const T come = exact_norm<T>(size, [&](int64_t i) { return here[i] - anchor[i]; });
      stuck = !(come > static_cast<T>(all.drift) * *path);
    }
    if (status == RUNNING && stuck) status = STALLED;
    *milestone = *best_score;
    *path = 0;
    std::copy(here, here + size, anchor);
  }
  all.status[b] = status;
  if (status != RUNNING) return;
  if (accepted) {
    if (all.rejections[b] > 0) *scale = std::fmin(2 * *scale, T(1));
    all.rejections[b] = 0;
    return anderson(all, b, trial, moved, filled, next);
  }
  // A shortened step along the last residual; the differences are forgotten.
  if (++all.rejections[b] > 1) *scale /= 2;
  all.count[b] = 0;
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
                if (all.status[b] == RUNNING) turn_of<T>(all, row, b);
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
