// Vectors of floats: AVX-512 where the compiler's flags have it, else AVX2 with FMA.
//
// Masks say which lanes count; what does not count is exactly zero, or minus infinity.
#pragma once
#include <immintrin.h>

namespace {

#if defined(__AVX512F__)

using Vec = __m512;
using Mask = __mmask16;
constexpr int LANES = 16;

inline Vec load(const float* x) { return _mm512_load_ps(x); }
inline void store(float* x, Vec v) { _mm512_store_ps(x, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Mask not_below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Vec keep(Mask m, Vec a) { return _mm512_maskz_mov_ps(m, a); }
inline Vec choose(Mask m, Vec a, Vec b) { return _mm512_mask_mov_ps(b, m, a); }
// Lanes first <= lane < end.
inline Mask lanes(int first, int end) {
  unsigned below = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  unsigned before = first >= 16 ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
  return static_cast<Mask>(below & ~before);
}
inline bool any_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) != 0; }  // or NaN
inline float total(Vec v) { return _mm512_reduce_add_ps(v); }
inline Vec round_off(Vec a) { return _mm512_roundscale_ps(a, 8); }
inline Vec times_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }  // a 2^n

#elif defined(__AVX2__) && defined(__FMA__)

using Vec = __m256;
using Mask = __m256;
constexpr int LANES = 8;

inline Vec load(const float* x) { return _mm256_load_ps(x); }
inline void store(float* x, Vec v) { _mm256_store_ps(x, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Mask not_below(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
inline Vec keep(Mask m, Vec a) { return _mm256_and_ps(m, a); }
inline Vec choose(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }
inline Mask lanes(int first, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  return _mm256_castsi256_ps(_mm256_andnot_si256(before, below));
}
inline bool any_above(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) != 0;
}
inline float total(Vec v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Vec round_off(Vec a) { return _mm256_round_ps(a, 8); }
inline Vec times_power(Vec a, Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

#else
#error "AVX-512 or AVX2 with FMA is needed"
#endif

// exp(x) for |x| <= 87 to about one unit in the last place; NaN for NaN. The remainder of x by log 2
// (in two parts, the first exact in few bits) goes through Taylor's polynomial of degree six.
inline Vec exp_bounded(Vec x) {
  const Vec n = round_off(mul(x, broadcast(1.44269504f)));
  Vec r = fnma(n, broadcast(0.693145752f), x);
  r = fnma(n, broadcast(1.42860677e-6f), r);
  Vec p = broadcast(1.0f / 720);
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return times_power(p, n);
}

// exp(x) for any x <= 0, zero below the smallest normal number; NaN for NaN.
inline Vec exp_negative(Vec x) {
  const Vec lowest = broadcast(-87.3f);
  return keep(not_below(x, lowest), exp_bounded(larger(lowest, x)));
}

template <bool BOUNDED>
inline Vec exponential(Vec x) {
  return BOUNDED ? exp_bounded(x) : exp_negative(x);
}

// Eight floats of each of eight rows, changed into eight columns.
inline void transpose(__m256 (&x)[8]) {
  __m256 y[8];
  for (int k = 0; k < 8; k += 2) {
    y[k] = _mm256_unpacklo_ps(x[k], x[k + 1]);
    y[k + 1] = _mm256_unpackhi_ps(x[k], x[k + 1]);
  }
  for (int k = 0; k < 8; k += 4) {
    x[k] = _mm256_shuffle_ps(y[k], y[k + 2], 0x44);
    x[k + 1] = _mm256_shuffle_ps(y[k], y[k + 2], 0xee);
    x[k + 2] = _mm256_shuffle_ps(y[k + 1], y[k + 3], 0x44);
    x[k + 3] = _mm256_shuffle_ps(y[k + 1], y[k + 3], 0xee);
  }
  for (int k = 0; k < 4; k++) {
    y[k] = _mm256_permute2f128_ps(x[k], x[k + 4], 0x20);
    y[k + 4] = _mm256_permute2f128_ps(x[k], x[k + 4], 0x31);
  }
  for (int k = 0; k < 8; k++) x[k] = y[k];
}

}  // namespace
