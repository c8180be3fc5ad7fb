// Gradient and Hessian-vector product of the bi-softmax energy on a CPU, without an N x N matrix.
//
// With S = beta Z Z^T, L_i = log sum_j exp(S_ij) and P_ij = exp(S_ij - L_i) the gradient is (P + P^T) Z.
// S is symmetric: the tiles of its upper triangle are computed, and serve rows and columns.
// Masked tokens are left out when a head is packed, so that nothing below knows of masks.
// For processors with AVX2 or AVX-512; built for others, it is empty.
#if defined(__AVX2__) || defined(__AVX512F__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "sweeps.h"
#include "threads.h"

namespace {

using std::int64_t;

constexpr float LARGEST_EXPONENT = 60.0f;      // exp of it, and sums of that, are finite
constexpr int64_t KEPT_TILES = 256;            // of a slot, from one sweep to the next: 2.3 MB or twice that
constexpr int64_t WORTH_A_THREAD = 1 << 19;    // multiplications, N^2 p a head; below, one thread
constexpr int64_t SHARED_TOKENS = 4 * TILE;    // from here on a head may be shared by threads

struct Problem {
  const float *z, *v;               // (B, H, N, p); v null: the gradient
  const unsigned char* mask;        // (B, N) contiguous, or null
  const float *lse, *cotangent;     // (B, H, N) contiguous, or null
  float *output, *output_lse;       // (B, H, N, p) and (B, H, N) contiguous
  int64_t batch, heads, tokens, features;
  int64_t z_strides[3], v_strides[3];
  Fork fork;
  int64_t threads;
  float beta;
  int32_t causal, bounded;          // bounded 0: the scores may be of any size
};

struct Slot {
  PerToken per_token;
  float* means;     // sums of P_ij T_ij
  float* output;    // (padded, width)
  float* tiles;     // kept ones, and a last one for all that are not
};

// One head: its counted tokens, packed and padded with zeros.
struct Head {
  int64_t number;
  int tokens, blocks, features, width;
  int* places;              // of the tokens, among all
  float *z, *v;             // (padded, width)
  float *z_columns, *v_columns;  // (blocks, width, TILE)
  float *lse, *share, *tilt;
  float own_score;          // of the first token
  bool bounded, causal;

  int padded() const { return blocks * TILE; }
  Tile tile(int i, int j) const {
    const int rows = tokens - i * TILE, columns = tokens - j * TILE;
    return {i * TILE, j * TILE, rows < TILE ? rows : TILE, columns < TILE ? columns : TILE,
            i == j,   causal && i == j};
  }
};

int padded_width(const Problem& p) {
  return static_cast<int>((p.features + LANES - 1) / LANES * LANES);
}

int64_t kept_tiles(int64_t blocks) {
  const int64_t all = blocks * (blocks + 1) / 2;
  return all < KEPT_TILES ? all : KEPT_TILES;
}

std::size_t arena_size(const Problem& p, int slots) {
  const int64_t blocks = (p.tokens + TILE - 1) / TILE, padded = blocks * TILE;
  const int64_t rows = padded * padded_width(p);
  const int64_t sides = p.v ? 2 : 1, tile = sides * TILE * TILE;
  const int64_t head = 2 * sides * rows + 4 * padded;
  const int64_t slot = 3 * padded + rows + (kept_tiles(blocks) + 1) * tile;
  return static_cast<std::size_t>(head + slots * slot + 16 * (8 + 5 * slots));
}

// The first eight of `count` floats, zeros where there are fewer.
inline __m256 some(const float* from, int count) {
  if (count >= 8) return _mm256_loadu_ps(from);
  alignas(32) float few[8] = {};
  for (int k = 0; k < count; k++) few[k] = from[k];
  return _mm256_load_ps(few);
}

inline void copy(const float* from, int count, float* to) {
  int k = 0;
  for (; k + 8 <= count; k += 8) _mm256_storeu_ps(to + k, _mm256_loadu_ps(from + k));
  for (; k < count; k++) to[k] = from[k];
}

// The tokens of a tensor to rows and columns of the head, eight by eight.
void pack(const Head& head, const float* from, int64_t stride, float* rows, float* columns) {
  const int width = head.width, end = (head.tokens + LANES - 1) / LANES * LANES;
  for (int n = 0; n < end; n += 8) {
    float* column = columns + static_cast<int64_t>(n / TILE) * width * TILE + n % TILE;
    for (int k = 0; k < width; k += 8) {
      __m256 block[8];
      for (int r = 0; r < 8; r++) {
        block[r] = _mm256_setzero_ps();
        if (n + r < head.tokens && k < head.features)
          block[r] = some(from + head.places[n + r] * stride + k, head.features - k);
        _mm256_store_ps(rows + static_cast<int64_t>(n + r) * width + k, block[r]);
      }
      transpose(block);
      for (int r = 0; r < 8; r++) _mm256_store_ps(column + (k + r) * TILE, block[r]);
    }
  }
  std::memset(rows + static_cast<int64_t>(end) * width, 0,
              sizeof(float) * (head.padded() - end) * width);
}

// Whether exp(S) needs no largest score: |S_ij| <= beta max |z_i|^2 by Cauchy-Schwarz. No for NaN.
// Keeps S_00 too, with the rounding that the tiles give it.
bool scores_are_small(const Problem& p, Head& head) {
  bool all = p.bounded != 0;
  alignas(64) float first[LANES] = {};
  for (int n = 0; n < head.tokens; n += LANES) {
    const float* column = head.z_columns + static_cast<int64_t>(n / TILE) * head.width * TILE + n % TILE;
    Vec squares = zero();
    for (int k = 0; k < head.features; k++)
      squares = fma(load(column + k * TILE), load(column + k * TILE), squares);
    const Vec scores = mul(squares, broadcast(p.beta));
    if (n == 0) store(first, scores);
    if (any_above(scores, broadcast(LARGEST_EXPONENT))) all = false;
  }
  head.own_score = first[0];
  return all;
}

Head packed_head(const Problem& p, int64_t number, Arena& arena) {
  const int64_t batch = number / p.heads, in_batch = number % p.heads;
  Head head{};
  head.number = number;
  head.features = static_cast<int>(p.features);
  head.width = padded_width(p);
  head.causal = p.causal != 0;
  const int64_t all = (p.tokens + TILE - 1) / TILE * TILE;
  head.places = reinterpret_cast<int*>(arena.take(all));
  const unsigned char* mask = p.mask ? p.mask + batch * p.tokens : nullptr;
  for (int64_t n = 0; n < p.tokens; n++)
    if (!mask || mask[n]) head.places[head.tokens++] = static_cast<int>(n);
  head.blocks = (head.tokens + TILE - 1) / TILE;
  for (float** each : {&head.lse, &head.share, &head.tilt}) *each = arena.take(all);
  head.z = arena.take(all * head.width);
  head.z_columns = arena.take(all * head.width);
  const float* z = p.z + batch * p.z_strides[0] + in_batch * p.z_strides[1];
  pack(head, z, p.z_strides[2], head.z, head.z_columns);
  if (p.v) {
    head.v = arena.take(all * head.width);
    head.v_columns = arena.take(all * head.width);
    const float* v = p.v + batch * p.v_strides[0] + in_batch * p.v_strides[1];
    pack(head, v, p.v_strides[2], head.v, head.v_columns);
  }
  head.bounded = scores_are_small(p, head);
  return head;
}

Slot empty_slot(const Problem& p, const Head& head, Arena& arena) {
  const int64_t padded = head.padded(), all = (p.tokens + TILE - 1) / TILE;
  Slot slot{};
  slot.per_token = {arena.take(padded), arena.take(padded), head.lse, head.share, head.tilt};
  slot.means = arena.take(padded);
  slot.output = arena.take(padded * head.width);
  slot.tiles = arena.take((kept_tiles(all) + 1) * (p.v ? 2 : 1) * TILE * TILE);
  for (int64_t n = 0; n < padded; n++) {
    slot.per_token.sum[n] = slot.means[n] = 0.0f;
    slot.per_token.largest[n] = LOWEST;
  }
  std::memset(slot.output, 0, sizeof(float) * padded * head.width);
  return slot;
}

// The sweeps of one head by slot `which` of `slots`, which share its rows of tiles.
template <bool BOUNDED, bool CAUSAL>
struct Sweeps {
  const Problem& p;
  Head& head;
  Slot& slot;
  int which, slots;

  // Blocks of rows get shorter: to and fro, all slots get about the same.
  bool mine(int block) const {
    const int turn = block % (2 * slots);
    return which == (turn < slots ? turn : 2 * slots - 1 - turn);
  }

  // each(tile, i, j, scores, kept) for all tiles of the slot, in order; end(i) after a row of them.
  template <class Each, class End>
  void over_tiles(Each each, End end) {
    const int64_t size = (p.v ? 2 : 1) * TILE * TILE;
    int64_t number = 0;
    const int64_t kept = kept_tiles((p.tokens + TILE - 1) / TILE);
    for (int i = 0; i < head.blocks; i++) {
      if (!mine(i)) continue;
      for (int j = i; j < head.blocks; j++, number++)
        each(head.tile(i, j), i, j, slot.tiles + (number < kept ? number : kept) * size,
             number < kept);
      end(i);
    }
  }

  void scores(const Tile& tile, int j, float* result) const {
    const Pair pair{head.z + static_cast<int64_t>(tile.row) * head.width,
                    head.z_columns + static_cast<int64_t>(j) * head.width * TILE};
    tile_products(&pair, 1, tile.rows, tile.columns, head.features, head.width, p.beta, result);
  }

  void tangents(const Tile& tile, int j, float* result) const {
    const int64_t row = static_cast<int64_t>(tile.row) * head.width;
    const int64_t column = static_cast<int64_t>(j) * head.width * TILE;
    const Pair pairs[2] = {{head.v + row, head.z_columns + column},
                           {head.z + row, head.v_columns + column}};
    tile_products(pairs, 2, tile.rows, tile.columns, head.features, head.width, p.beta, result);
  }

  void sum() {
    RowSums rows;
    rows.clear();
    over_tiles(
        [&](const Tile& tile, int, int j, float* place, bool) {
          scores(tile, j, place);
          if constexpr (BOUNDED)
            tile.masked() ? sum_exponentials<CAUSAL, true>(tile, place, rows, slot.per_token)
                          : sum_exponentials<CAUSAL, false>(tile, place, rows, slot.per_token);
          else
            tile.masked() ? sum_scores<CAUSAL, true>(tile, place, rows, slot.per_token)
                          : sum_scores<CAUSAL, false>(tile, place, rows, slot.per_token);
        },
        [&](int i) {
          const int count = CAUSAL ? 0 : head.tile(i, i).rows;
          for (int r = 0; r < count; r++) add_row(i * TILE + r, rows, r);
          rows.clear();
        });
  }

  void add_row(int token, const RowSums& rows, int r) {
    alignas(64) float sums[LANES], tops[LANES];
    if (BOUNDED) {
      slot.per_token.sum[token] += total(rows.sum[r]);
      return;
    }
    store(sums, rows.sum[r]);
    store(tops, rows.largest[r]);
    for (int k = 0; k < LANES; k++)
      merge(slot.per_token.sum[token], slot.per_token.largest[token], sums[k], tops[k]);
  }

  static void merge(float& sum, float& largest, float other, float other_largest) {
    const float top = largest > other_largest ? largest : other_largest;
    sum = sum * std::exp(largest - top) + other * std::exp(other_largest - top);
    largest = top;
  }

  void sum_means() {
    RowSums rows;
    rows.clear();
    PerToken per_token = slot.per_token;
    per_token.sum = slot.means;
    over_tiles(
        [&](const Tile& tile, int, int j, float* place, bool) {
          float* other = place + TILE * TILE;
          scores(tile, j, place);
          tangents(tile, j, other);
          tile.masked()
              ? sum_tangents<BOUNDED, CAUSAL, true>(tile, place, other, rows, per_token)
              : sum_tangents<BOUNDED, CAUSAL, false>(tile, place, other, rows, per_token);
        },
        [&](int i) {
          const int count = CAUSAL ? 0 : head.tile(i, i).rows;
          for (int r = 0; r < count; r++) slot.means[i * TILE + r] += total(rows.sum[r]);
          rows.clear();
        });
  }

  void apply_gradient() {
    over_tiles(
        [&](const Tile& tile, int, int j, float* place, bool kept) {
          if (!kept) scores(tile, j, place);
          tile.masked() ? weigh<BOUNDED, CAUSAL, true>(tile, place, kept, slot.per_token)
                        : weigh<BOUNDED, CAUSAL, false>(tile, place, kept, slot.per_token);
          const float* sides[1] = {head.z};
          apply(tile, place, sides, 1);
        },
        [](int) {});
  }

  void apply_product() {
    over_tiles(
        [&](const Tile& tile, int, int j, float* place, bool kept) {
          float* other = place + TILE * TILE;
          if (!kept) scores(tile, j, place), tangents(tile, j, other);
          tile.masked()
              ? weigh_tangents<BOUNDED, CAUSAL, true>(tile, place, other, kept, slot.per_token)
              : weigh_tangents<BOUNDED, CAUSAL, false>(tile, place, other, kept, slot.per_token);
          const float* sides[2] = {head.v, head.z};
          apply(tile, place, sides, 2);
        },
        [](int) {});
  }

  // To the rows of the tile, and to its columns unless it is its own transpose.
  void apply(const Tile& tile, const float* matrices, const float* const* sides, int count) {
    const int width = head.width;
    const int64_t row = static_cast<int64_t>(tile.row) * width;
    const int64_t column = static_cast<int64_t>(tile.column) * width;
    Factor factors[2];
    for (int k = 0; k < count; k++) factors[k] = {matrices + k * TILE * TILE, sides[k] + column};
    add_outputs<false>(factors, count, tile.rows, tile.columns, width, slot.output + row);
    if (tile.diagonal && !CAUSAL) return;
    for (int k = 0; k < count; k++) factors[k].side = sides[k] + row;
    add_outputs<true>(factors, count, tile.columns, tile.rows, width, slot.output + column);
  }
};

// What lies between the sweeps, for all slots of a head.
template <bool BOUNDED, bool CAUSAL>
struct Between {
  const Problem& p;
  Head& head;
  Slot* all;
  int slots;

  void finish_sums() {
    using Own = Sweeps<BOUNDED, CAUSAL>;
    PerToken& first = all[0].per_token;
    for (int s = 1; s < slots; s++)
      for (int n = 0; n < head.tokens; n++) {
        const PerToken& other = all[s].per_token;
        if (BOUNDED)
          first.sum[n] += other.sum[n];
        else
          Own::merge(first.sum[n], first.largest[n], other.sum[n], other.largest[n]);
      }
    for (int n = 0; n < head.tokens; n++) {
      head.lse[n] = std::log(first.sum[n]) + (BOUNDED ? 0.0f : first.largest[n]);
      head.share[n] = 1.0f / first.sum[n];
    }
    // log(exp(s)) has the rounding of 1, not that of s.
    if (BOUNDED && (CAUSAL || head.tokens == 1)) head.lse[0] = head.own_score;
  }

  void take_lse() {
    const float* given = p.lse + head.number * p.tokens;
    for (int n = 0; n < head.tokens; n++) {
      head.lse[n] = given[head.places[n]];
      head.share[n] = std::exp(-head.lse[n]);
    }
  }

  void finish_means() {
    const float* cotangent = p.cotangent ? p.cotangent + head.number * p.tokens : nullptr;
    for (int n = 0; n < head.tokens; n++) {
      float mean = 0.0f;
      for (int s = 0; s < slots; s++) mean += all[s].means[n];
      if (BOUNDED) mean *= head.share[n];
      if (cotangent) mean -= p.beta * cotangent[head.places[n]];
      head.tilt[n] = BOUNDED ? mean * head.share[n] : mean;
    }
  }

  void write() {
    float* output = p.output + head.number * p.tokens * p.features;
    float* lse = p.v ? nullptr : p.output_lse + head.number * p.tokens;
    if (head.tokens < p.tokens) {
      std::memset(output, 0, sizeof(float) * p.tokens * p.features);
      if (lse) std::memset(lse, 0, sizeof(float) * p.tokens);
    }
    for (int n = 0; n < head.tokens; n++) {
      const int64_t row = static_cast<int64_t>(n) * head.width;
      float* out = output + head.places[n] * p.features;
      copy(all[0].output + row, head.features, out);
      for (int s = 1; s < slots; s++)
        for (int k = 0; k < head.features; k++) out[k] += all[s].output[row + k];
      if (lse) lse[head.places[n]] = head.lse[n];
    }
  }
};

// All sweeps of a head; run(sweep) calls sweep(slot) for every slot.
template <bool BOUNDED, bool CAUSAL, class Run>
void solve_head(const Problem& p, Head& head, Slot* all, int slots, Run run) {
  Between<BOUNDED, CAUSAL> between{p, head, all, slots};
  const auto sweeps = [&](int slot) {
    return Sweeps<BOUNDED, CAUSAL>{p, head, all[slot], slot, slots};
  };
  if (p.lse) {
    between.take_lse();
  } else {
    run([&](int slot) { sweeps(slot).sum(); });
    between.finish_sums();
  }
  if (p.v) {
    run([&](int slot) { sweeps(slot).sum_means(); });
    between.finish_means();
    run([&](int slot) { sweeps(slot).apply_product(); });
  } else {
    run([&](int slot) { sweeps(slot).apply_gradient(); });
  }
  between.write();
}

template <class Run>
void solve(const Problem& p, int64_t number, int slots, Arena& arena, Run run) {
  Head head = packed_head(p, number, arena);
  Slot all[MOST_THREADS];
  for (int s = 0; s < slots; s++) all[s] = empty_slot(p, head, arena);
  if (head.bounded)
    head.causal ? solve_head<true, true>(p, head, all, slots, run)
                : solve_head<true, false>(p, head, all, slots, run);
  else
    head.causal ? solve_head<false, true>(p, head, all, slots, run)
                : solve_head<false, false>(p, head, all, slots, run);
}

}  // namespace

// 0, or 1 where memory was missing. Whole heads are taken by threads in turn; those that are left over
// when all threads have had as many are shared, each thread with some of their rows.
extern "C" __attribute__((visibility("default"))) int implicit_attn_bi_softmax(const Problem* given) {
  const Problem& p = *given;
  const int64_t count = p.batch * p.heads;
  const int64_t worth = count * p.tokens * p.tokens * p.features / WORTH_A_THREAD + 1;
  const int64_t most = worth < MOST_THREADS ? worth : MOST_THREADS;
  const int threads = static_cast<int>(p.threads < most ? p.threads : most);
  const bool share = threads > 1 && p.tokens >= SHARED_TOKENS;
  const int64_t whole = share ? count - count % threads : count;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const int teams = static_cast<int>(whole < threads ? whole : threads);
  if (teams > 0)
    in_parallel(p.fork, teams, [&](int) {
      Arena& arena = arena_of_this_thread();
      for (int64_t number; !failed && (number = next++) < whole;) {
        if (!arena.reserve(arena_size(p, 1)))
          failed = true;
        else
          solve(p, number, 1, arena, [](auto sweep) { sweep(0); });
      }
      arena.release();
    });
  Arena& arena = arena_of_this_thread();
  for (int64_t number = whole; !failed && number < count; number++) {
    if (!arena.reserve(arena_size(p, threads)))
      failed = true;
    else
      solve(p, number, threads, arena,
            [&](auto sweep) { in_parallel(p.fork, threads, sweep); });
  }
  arena.release();
  return failed ? 1 : 0;
}
#endif
