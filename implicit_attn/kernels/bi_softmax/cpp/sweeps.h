// What is done to a tile of scores: sums of exponentials, weights, tangents.
//
// A tile has rows of one block of tokens and columns of the same or a later one, so the tiles cover
// the upper triangle of the symmetric matrix S. BOUNDED: exp(S) and sums of it stay within float.
// CAUSAL: token j attends to i <= j, so only the columns have a softmax. MASKED: some elements of the
// tile do not count.
#pragma once
#include "tiles.h"

namespace {

constexpr int VECTORS = TILE / LANES;
constexpr float LOWEST = -3e38f;  // finite, so that differences of it are no NaN

struct Tile {
  int row, column;    // first tokens
  int rows, columns;  // tokens that count
  bool diagonal, lower_blocked;

  int vectors() const { return (columns + LANES - 1) / LANES; }
  bool masked() const { return columns % LANES != 0 || lower_blocked; }
  Mask mask(int r, int c) const {
    return lanes(lower_blocked ? r - c * LANES : 0, columns - c * LANES);
  }
};

// Sums over the row of a tile, by lane, until its last tile is done.
struct RowSums {
  Vec sum[TILE], largest[TILE];

  void clear() {
    for (int r = 0; r < TILE; r++) sum[r] = zero(), largest[r] = broadcast(LOWEST);
  }
};

// One number for each token.
struct PerToken {
  float *sum, *largest;             // running sums of exp(S - largest)
  const float *lse, *share, *tilt;  // L; exp(-L); what the product subtracts
};

inline void add_at(float* x, Vec v) { store(x, add(load(x), v)); }

template <bool MASKED>
inline Vec counted(const Tile& tile, int r, int c, Vec value) {
  return MASKED ? keep(tile.mask(r, c), value) : value;
}

template <bool MASKED>
inline Vec score(const Tile& tile, int r, int c, const float* scores) {
  const Vec s = load(scores + r * TILE + c * LANES);
  return MASKED ? choose(tile.mask(r, c), s, broadcast(-__builtin_inff())) : s;
}

// Scores to exponentials, and their sums over rows and columns.
template <bool CAUSAL, bool MASKED>
void sum_exponentials(const Tile& tile, float* scores, RowSums& rows, const PerToken& per_token) {
  const int vectors = tile.vectors();
  Vec columns[VECTORS];
  for (Vec& column : columns) column = zero();
  for (int r = 0; r < tile.rows; r++) {
    Vec sum = zero();
    for (int c = 0; c < vectors; c++) {
      float* place = scores + r * TILE + c * LANES;
      const Vec e = counted<MASKED>(tile, r, c, exp_bounded(load(place)));
      store(place, e);
      sum = add(sum, e);
      columns[c] = add(columns[c], e);
    }
    if (!CAUSAL) rows.sum[r] = add(rows.sum[r], sum);
  }
  if (CAUSAL || !tile.diagonal)
    for (int c = 0; c < vectors; c++) add_at(per_token.sum + tile.column + c * LANES, columns[c]);
}

// The same for scores of any size, which stay as they are: sums of exp(S - largest so far).
template <bool CAUSAL, bool MASKED>
void sum_scores(const Tile& tile, const float* scores, RowSums& rows, const PerToken& per_token) {
  const int vectors = tile.vectors();
  for (int c = 0; (CAUSAL || !tile.diagonal) && c < vectors; c++) {
    float* largest = per_token.largest + tile.column + c * LANES;
    float* sums = per_token.sum + tile.column + c * LANES;
    const Vec before = load(largest);
    Vec top = before;
    for (int r = 0; r < tile.rows; r++) top = larger(top, score<MASKED>(tile, r, c, scores));
    Vec sum = mul(load(sums), exp_negative(sub(before, top)));
    for (int r = 0; r < tile.rows; r++)
      sum = add(sum, exp_negative(sub(score<MASKED>(tile, r, c, scores), top)));
    store(largest, top);
    store(sums, sum);
  }
  for (int r = 0; !CAUSAL && r < tile.rows; r++) {
    Vec top = rows.largest[r];
    for (int c = 0; c < vectors; c++) top = larger(top, score<MASKED>(tile, r, c, scores));
    Vec sum = mul(rows.sum[r], exp_negative(sub(rows.largest[r], top)));
    for (int c = 0; c < vectors; c++)
      sum = add(sum, exp_negative(sub(score<MASKED>(tile, r, c, scores), top)));
    rows.largest[r] = top;
    rows.sum[r] = sum;
  }
}

// P_ij + P_ji in place of the scores, or of the exponentials where those are there already.
template <bool BOUNDED, bool CAUSAL, bool MASKED>
void weigh(const Tile& tile, float* scores, bool exponentials, const PerToken& per_token) {
  const int vectors = tile.vectors();
  const float* numbers = BOUNDED ? per_token.share : per_token.lse;
  for (int r = 0; r < tile.rows; r++) {
    const Vec own = broadcast(numbers[tile.row + r]);
    for (int c = 0; c < vectors; c++) {
      float* place = scores + r * TILE + c * LANES;
      const Vec other = load(numbers + tile.column + c * LANES);
      Vec x = load(place);
      if (BOUNDED) {
        if (!exponentials) x = counted<MASKED>(tile, r, c, exp_bounded(x));
        x = mul(x, CAUSAL ? other : add(own, other));
      } else {
        const Vec by_column = exp_negative(sub(x, other));
        x = CAUSAL ? by_column : add(exp_negative(sub(x, own)), by_column);
        x = counted<MASKED>(tile, r, c, x);
      }
      store(place, x);
    }
  }
}

// Sums of P_ij T_ij over rows and columns (BOUNDED: of exp(S) T, and scores and tangents become
// exp(S) and exp(S) T).
template <bool BOUNDED, bool CAUSAL, bool MASKED>
void sum_tangents(const Tile& tile, float* scores, float* tangents, RowSums& rows,
                  const PerToken& per_token) {
  const int vectors = tile.vectors();
  Vec columns[VECTORS];
  for (Vec& column : columns) column = zero();
  for (int r = 0; r < tile.rows; r++) {
    Vec sum = zero();
    const Vec own = broadcast(BOUNDED ? 0.0f : per_token.lse[tile.row + r]);
    for (int c = 0; c < vectors; c++) {
      float *score = scores + r * TILE + c * LANES, *tangent = tangents + r * TILE + c * LANES;
      const Vec s = load(score), t = load(tangent);
      if (BOUNDED) {
        const Vec e = counted<MASKED>(tile, r, c, exp_bounded(s));
        const Vec tilted = counted<MASKED>(tile, r, c, mul(e, t));
        store(score, e);
        store(tangent, tilted);
        sum = add(sum, tilted);
        columns[c] = add(columns[c], tilted);
      } else {
        const Vec by_column = exp_negative(sub(s, load(per_token.lse + tile.column + c * LANES)));
        columns[c] = add(columns[c], counted<MASKED>(tile, r, c, mul(by_column, t)));
        if (!CAUSAL)
          sum = add(sum, counted<MASKED>(tile, r, c, mul(exp_negative(sub(s, own)), t)));
      }
    }
    if (!CAUSAL) rows.sum[r] = add(rows.sum[r], sum);
  }
  if (CAUSAL || !tile.diagonal)
    for (int c = 0; c < vectors; c++) add_at(per_token.sum + tile.column + c * LANES, columns[c]);
}

// What V and Z are multiplied by, in place of scores and tangents, or of what sum_tangents left there:
// G = P_ij + P_ji, and P_ij (T_ij - q_i) + P_ji (T_ij - q_j) with q the tilt (BOUNDED: share times q).
template <bool BOUNDED, bool CAUSAL, bool MASKED>
void weigh_tangents(const Tile& tile, float* scores, float* tangents, bool exponentials,
                    const PerToken& per_token) {
  const int vectors = tile.vectors();
  const float* numbers = BOUNDED ? per_token.share : per_token.lse;
  const float* tilts = per_token.tilt;
  for (int r = 0; r < tile.rows; r++) {
    const Vec own = broadcast(numbers[tile.row + r]), own_tilt = broadcast(tilts[tile.row + r]);
    for (int c = 0; c < vectors; c++) {
      float *score = scores + r * TILE + c * LANES, *tangent = tangents + r * TILE + c * LANES;
      const Vec other = load(numbers + tile.column + c * LANES);
      const Vec other_tilt = load(tilts + tile.column + c * LANES);
      Vec x = load(score), t = load(tangent);
      if (BOUNDED) {
        if (!exponentials) {
          x = counted<MASKED>(tile, r, c, exp_bounded(x));
          t = counted<MASKED>(tile, r, c, mul(x, t));
        }
        const Vec share = CAUSAL ? other : add(own, other);
        const Vec tilt = CAUSAL ? other_tilt : add(own_tilt, other_tilt);
        t = fnma(x, tilt, mul(t, share));
        x = mul(x, share);
      } else {
        const Vec by_column = exp_negative(sub(x, other));
        t = CAUSAL ? mul(by_column, sub(t, other_tilt)) : [&] {
          const Vec by_row = exp_negative(sub(x, own));
          x = add(by_row, by_column);
          return fma(by_row, sub(t, own_tilt), mul(by_column, sub(t, other_tilt)));
        }();
        x = counted<MASKED>(tile, r, c, CAUSAL ? by_column : x);
        t = counted<MASKED>(tile, r, c, t);
      }
      store(score, x);
      store(tangent, t);
    }
  }
}

}  // namespace
