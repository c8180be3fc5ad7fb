// Products of tiles with TILE rows and TILE columns, in registers.
//
// All arrays are aligned, and padded to whole tiles and vectors, so that rows may be rounded up:
// what is computed beyond the last row lies in the padding.
#pragma once
#include "vectors.h"

namespace {

constexpr int TILE = 48;
constexpr int MOST_COLUMNS = LANES == 16 ? 3 : 2;  // vectors that a block of scores is wide
constexpr int MOST_FEATURES = LANES == 16 ? 4 : 2;  // vectors that a block of outputs is wide

// Rows of a block so many vectors wide: they divide TILE, and their sums fill the registers.
constexpr int rows_of_block(int vectors) {
  if (LANES == 16) return vectors >= 4 ? 6 : vectors == 3 ? 8 : 12;
  return vectors >= 2 ? 6 : 8;
}

// Rows of one tile, and those of another laid out by columns, which are multiplied.
struct Pair {
  const float* rows;     // (TILE, width), `width` apart
  const float* columns;  // (features, TILE)
};

template <int C>
void block_of_products(const Pair* pairs, int count, int rows, int features, int width, float scale,
                       float* result) {
  constexpr int R = rows_of_block(C);
  for (int row = 0; row < rows; row += R) {
    Vec sums[R][C];
    for (auto& line : sums)
      for (Vec& sum : line) sum = zero();
    for (int pair = 0; pair < count; pair++) {
      const float* left = pairs[pair].rows + row * width;
      const float* right = pairs[pair].columns;
      for (int k = 0; k < features; k++) {
        Vec b[C];
        for (int c = 0; c < C; c++) b[c] = load(right + k * TILE + c * LANES);
        for (int r = 0; r < R; r++) {
          const Vec a = broadcast(left[r * width + k]);
          for (int c = 0; c < C; c++) sums[r][c] = fma(a, b[c], sums[r][c]);
        }
      }
    }
    const Vec factor = broadcast(scale);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++)
        store(result + (row + r) * TILE + c * LANES, mul(sums[r][c], factor));
  }
}

// result (TILE, TILE) = scale (sum over the pairs of rows times columns).
inline void tile_products(const Pair* pairs, int count, int rows, int columns, int features,
                          int width, float scale, float* result) {
  const int vectors = (columns + LANES - 1) / LANES;
  for (int first = 0; first < vectors; first += MOST_COLUMNS) {
    Pair shifted[2];
    for (int pair = 0; pair < count; pair++)
      shifted[pair] = {pairs[pair].rows, pairs[pair].columns + first * LANES};
    float* out = result + first * LANES;
    const int wide = vectors - first < MOST_COLUMNS ? vectors - first : MOST_COLUMNS;
    if (wide == 1) block_of_products<1>(shifted, count, rows, features, width, scale, out);
    if (wide == 2) block_of_products<2>(shifted, count, rows, features, width, scale, out);
    if (wide == 3) block_of_products<3>(shifted, count, rows, features, width, scale, out);
  }
}

// A matrix (TILE, TILE) and what it, or its transpose, is applied to.
struct Factor {
  const float* matrix;
  const float* side;  // (TILE, width)
};

template <int C, bool TRANSPOSED>
void block_of_outputs(const Factor* factors, int count, int rows, int inner, int width,
                      float* output) {
  constexpr int R = rows_of_block(C);
  constexpr int ROW = TRANSPOSED ? 1 : TILE, INNER = TRANSPOSED ? TILE : 1;
  for (int row = 0; row < rows; row += R) {
    Vec sums[R][C];
    float* out = output + row * width;
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][c] = load(out + r * width + c * LANES);
    for (int factor = 0; factor < count; factor++) {
      const float* left = factors[factor].matrix + row * ROW;
      const float* right = factors[factor].side;
      for (int k = 0; k < inner; k++) {
        Vec b[C];
        for (int c = 0; c < C; c++) b[c] = load(right + k * width + c * LANES);
        for (int r = 0; r < R; r++) {
          const Vec a = broadcast(left[r * ROW + k * INNER]);
          for (int c = 0; c < C; c++) sums[r][c] = fma(a, b[c], sums[r][c]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) store(out + r * width + c * LANES, sums[r][c]);
  }
}

// output (rows, width) += sum over the factors of the matrix, or its transpose, times its side.
template <bool TRANSPOSED>
void add_outputs(const Factor* factors, int count, int rows, int inner, int width, float* output) {
  for (int first = 0; first < width; first += MOST_FEATURES * LANES) {
    Factor shifted[2];
    for (int factor = 0; factor < count; factor++)
      shifted[factor] = {factors[factor].matrix, factors[factor].side + first};
    float* out = output + first;
    const int left = (width - first) / LANES, wide = left < MOST_FEATURES ? left : MOST_FEATURES;
    if (wide == 1) block_of_outputs<1, TRANSPOSED>(shifted, count, rows, inner, width, out);
    if (wide == 2) block_of_outputs<2, TRANSPOSED>(shifted, count, rows, inner, width, out);
    if (wide == 3) block_of_outputs<3, TRANSPOSED>(shifted, count, rows, inner, width, out);
    if (wide == 4) block_of_outputs<4, TRANSPOSED>(shifted, count, rows, inner, width, out);
  }
}

}  // namespace
