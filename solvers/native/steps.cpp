// Steps of iterative methods, sample by sample: a sample's vectors stay in the cache from its first
// product to its last sum. What the steps compute is said where they are written in Python:
// solvers/compiled/lanes.py, solvers/methods/anderson.py, solvers/krylov/gmres.py.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "threads.h"

namespace {

constexpr int64_t MOST = 64;  // vectors that are kept of a sample, as solvers/native/steps.py knows
constexpr int64_t RUNNING = -1, LEFT = -2, CONVERGED = 0, MAX_STEPS = 1;
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
  constexpr int64_t WORTH_A_THREAD = 1 << 15;
  int64_t slots = products / WORTH_A_THREAD + 1;
  slots = slots < threads ? slots : threads;
  slots = slots < batch ? slots : batch;
  slots = slots < MOST_THREADS ? slots : MOST_THREADS;
  if (slots <= 1) return rows(int64_t{0}, batch);
  in_parallel(reinterpret_cast<Fork>(fork), static_cast<int>(slots),
              [&](int slot) { rows(batch * slot / slots, batch * (slot + 1) / slots); });
}

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

// An evaluation of all samples that have not ended; see _Turn in solvers/native/steps.py.
struct Turn {
  Ring ring;
  void* trial;                   // (B, D) where f was evaluated; then where it is to be evaluated next
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
  T* z = static_cast<T*>(turn.trial) + b * size;
  T* residual = static_cast<T*>(turn.residual) + b * size;
  T *best_relative = static_cast<T*>(turn.best_relative) + b, *limit = static_cast<T*>(turn.limit) + b;
  const Judged<T> found =
      residual_of(z, static_cast<const T*>(turn.value) + b * size,
                  turn.mask ? turn.mask + b * size : nullptr, residual, size);
  const bool first = turn.count == 1;
  if (first) {
    *limit = static_cast<T>(turn.divergence) * std::fmax(found.norm, found.reference);
    static_cast<T*>(turn.milestone)[b] = std::numeric_limits<T>::infinity();
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
  anderson(turn.ring, b, size, first, z, residual, z);
}

// How many samples go on.
template <class T>
int64_t turn_of_all(const Turn& turn) {
  std::atomic<int64_t> running{0};
  const int64_t products = turn.batch * turn.size * (3 * turn.ring.kept + 4);
  over_rows(turn.fork, turn.threads, turn.batch, products, [&](int64_t begin, int64_t end) {
    int64_t own = 0;
    for (int64_t b = begin; b < end; b++) {
      if (turn.status[b] == RUNNING) turn_of<T>(turn, b);
      own += turn.status[b] == RUNNING;
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
  T parts[MOST + 1];
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
  T weights[MOST];
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

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int64_t turn_float(const Turn* turn) { return turn_of_all<float>(*turn); }
EXPORT int64_t turn_double(const Turn* turn) { return turn_of_all<double>(*turn); }
EXPORT void step_float(const Step* step) { step_of_all<float>(*step); }
EXPORT void step_double(const Step* step) { step_of_all<double>(*step); }
EXPORT int64_t move_float(const Move* move) { return move_of_all<float>(*move); }
EXPORT int64_t move_double(const Move* move) { return move_of_all<double>(*move); }
EXPORT int64_t absorb_float(const Cycle* cycle) { return absorb<float>(*cycle); }
EXPORT int64_t absorb_double(const Cycle* cycle) { return absorb<double>(*cycle); }
EXPORT void finish_float(const Cycle* cycle, void* solution, void* left) {
  finish<float>(*cycle, solution, left);
}
EXPORT void finish_double(const Cycle* cycle, void* solution, void* left) {
  finish<double>(*cycle, solution, left);
}
