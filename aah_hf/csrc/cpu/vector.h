// Vectors, exp2, storage types, register blocks and transposition: arithmetic without attention.
// Part of attention_kernel.h.
#pragma once

#include <utility>  // std::integer_sequence: a type without functions, so safe across instruction sets

#include "schedule.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define AAH_INLINE static inline __attribute__((always_inline))

namespace aah {
namespace AAH_ISA {
namespace {

constexpr int kRows = AAH_ROWS;  // rows of a register block; head_dim is a multiple of 8, hence of this
constexpr int kTall = 8;         // rows where it is one vector wide: 4 sums would wait for each other
constexpr int kWide = 3;         // vectors across a register block

template <typename C>
struct Traits;
template <>
struct Traits<float> {
  typedef int32_t Int;
};
template <>
struct Traits<double> {
  typedef int64_t Int;
};

template <typename C>
struct Vec {
  typedef typename Traits<C>::Int Int;
  typedef C V __attribute__((vector_size(AAH_VECTOR_BYTES)));
  typedef Int I __attribute__((vector_size(AAH_VECTOR_BYTES)));
  static constexpr int W = AAH_VECTOR_BYTES / sizeof(C);
  static constexpr int L = kWide * W;  // lanes of a panel
};

AAH_INLINE int32_t min_i(int32_t a, int32_t b) { return a < b ? a : b; }
AAH_INLINE int32_t max_i(int32_t a, int32_t b) { return a > b ? a : b; }
AAH_INLINE int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

template <typename C>
AAH_INLINE typename Vec<C>::V load(const C* p) {
  typename Vec<C>::V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename C>
AAH_INLINE void store(C* p, typename Vec<C>::V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <typename C>
AAH_INLINE typename Vec<C>::I load_int(const typename Vec<C>::Int* p) {
  typename Vec<C>::I v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename C>
AAH_INLINE typename Vec<C>::V splat(C x) {
  typename Vec<C>::V v = {};
  return v + x;  // x is never -0 where its sign matters
}

template <typename C>
AAH_INLINE C infinity() {
  return static_cast<C>(__builtin_inf());
}

// --- exp2 and tanh -------------------------------------------------------------------------------------------

// 2^x for x <= 0 (up to about 100 above), -inf gives exactly 0, NaN stays NaN. Relative error 1.2e-7: a
// degree-6 minimax polynomial (2e-9) on [-1/2, 1/2]; the exponent is added as an integer.
AAH_INLINE Vec<float>::V exp2_vec(Vec<float>::V x) {
  typedef Vec<float>::V V;
  typedef uint32_t U __attribute__((vector_size(AAH_VECTOR_BYTES)));  // its sum may wrap: for -inf, which is replaced
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const V shifted = x + magic;
  const V f = x - (shifted - magic);
  V p = f * 1.5345811968e-4f + 1.3399931385e-3f;
  p = p * f + 9.6184889587e-3f;
  p = p * f + 5.5503287766e-2f;
  p = p * f + 2.4022646891e-1f;
  p = p * f + 6.9314720574e-1f;
  p = p * f + 1.0f;
  const U bits = (U)p + ((U)shifted << 23);
  return x < -126.0f ? V{} : (V)bits;  // below, the integer addition would wrap; -inf lands here too
}

AAH_INLINE Vec<double>::V exp2_vec(Vec<double>::V x) {
  Vec<double>::V y = {};
  for (int i = 0; i < Vec<double>::W; ++i) y[i] = __builtin_exp2(x[i]);
  return y;
}

// tanh with a small *relative* error also near 0, where 1 - 2 / (e^2x + 1) cancels.
AAH_INLINE Vec<float>::V tanh_vec(Vec<float>::V x) {
  typedef Vec<float>::V V;
  typedef Vec<float>::I I;
  const V u = x * x;
  V p = u * -5.8632196500e-3f + 2.0763588368e-2f;  // minimax on [0, 0.6], 2.4e-9
  p = p * u + -5.3771847483e-2f;
  p = p * u + 1.3331729464e-1f;
  p = p * u + -3.3333285086e-1f;
  p = p * u + 1.0f;
  const V small = p * x;
  const V a = x < 0.0f ? -x : x;
  const V e = exp2_vec(a * -2.8853900818f);  // e^(-2|x|)
  const V t = (1.0f - e) / (1.0f + e);
  const V large = x < 0.0f ? -t : t;
  const I near = a < 0.6f;
  return near ? small : large;
}

AAH_INLINE Vec<double>::V tanh_vec(Vec<double>::V x) {
  Vec<double>::V y = {};
  for (int i = 0; i < Vec<double>::W; ++i) y[i] = __builtin_tanh(x[i]);
  return y;
}

// --- storage types -------------------------------------------------------------------------------------------

AAH_INLINE float float_from_bits(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

AAH_INLINE uint32_t bits_from_float(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

AAH_INLINE uint16_t bf16_from_float(float f) {
  const uint32_t u = bits_from_float(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);                  // to nearest even
}

#if !defined(__F16C__)
// Multiplying by 2^112 rebases the exponent and normalises half's subnormals in one exact step.
AAH_INLINE float float_from_half(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  uint32_t u = bits_from_float(float_from_bits(magnitude) * 5.192296858534828e33f);
  if ((h & 0x7c00u) == 0x7c00u) u = magnitude | 0x7f800000u;
  return float_from_bits(u | static_cast<uint32_t>(h & 0x8000u) << 16);
}

AAH_INLINE uint16_t half_from_float(float f) {
  const uint32_t u = bits_from_float(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (a >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and up
  if (a < 0x38800000u) {  // subnormal half: adding 0.5 leaves the rounded value in the low mantissa bits
    return static_cast<uint16_t>(sign | (bits_from_float(float_from_bits(a) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}
#endif

AAH_INLINE int64_t element_bytes(int32_t dtype) { return dtype == AAH_F64 ? 8 : dtype == AAH_F32 ? 4 : 2; }

AAH_INLINE void load_row(int32_t, const void* src, double* dst, int64_t n) { __builtin_memcpy(dst, src, n * 8); }

AAH_INLINE void load_row(int32_t dtype, const void* src, float* dst, int64_t n) {
  const uint16_t* h = static_cast<const uint16_t*>(src);
  if (dtype == AAH_F32) {
    __builtin_memcpy(dst, src, n * 4);
  } else if (dtype == AAH_BF16) {
    for (int64_t i = 0; i < n; ++i) dst[i] = float_from_bits(static_cast<uint32_t>(h[i]) << 16);
  } else {
#if defined(__F16C__)
    for (int64_t i = 0; i < n; i += 8) {  // n is a head size, a multiple of 8
      _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
    }
#else
    for (int64_t i = 0; i < n; ++i) dst[i] = float_from_half(h[i]);
#endif
  }
}

AAH_INLINE void store_row(int32_t, const double* src, void* dst, int64_t n) { __builtin_memcpy(dst, src, n * 8); }

AAH_INLINE void store_row(int32_t dtype, const float* src, void* dst, int64_t n) {
  uint16_t* h = static_cast<uint16_t*>(dst);
  if (dtype == AAH_F32) {
    __builtin_memcpy(dst, src, n * 4);
  } else if (dtype == AAH_BF16) {
    for (int64_t i = 0; i < n; ++i) h[i] = bf16_from_float(src[i]);
  } else {
#if defined(__F16C__)
    for (int64_t i = 0; i < n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(h + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    }
#else
    for (int64_t i = 0; i < n; ++i) h[i] = half_from_float(src[i]);
#endif
  }
}

// --- register blocks -----------------------------------------------------------------------------------------

// acc[r][v] = sum over k < depth of A[r, k] * B[k, v]. B's rows hold NV vectors. A's element [r, k] is a[r][k] when a
// row's k are contiguous (K_CONTIGUOUS), else a[0][k * lda + r]. 4 x 3 vectors fill 16 registers: 12 sums, 3
// of B, 1 broadcast; 7 loads feed 12 multiply-adds.
template <typename C, int R, int NV, bool K_CONTIGUOUS>
AAH_INLINE void multiply(const C* const (&a)[R], int64_t lda, const C* b, int64_t ldb, int64_t depth,
                         typename Vec<C>::V (&acc)[R][NV]) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) acc[r][v] = V{};
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    V bv[NV];
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) bv[v] = load<C>(b + k * ldb + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const C s = K_CONTIGUOUS ? a[r][k] : a[0][k * lda + r];
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) acc[r][v] += bv[v] * s;
    }
  }
}

// Row pointers of a block; rows past the last repeat it, so a short block computes duplicates and reads nothing else.
template <typename C, int R>
AAH_INLINE void block_rows(const C* a, int64_t lda, int32_t row, int32_t rows, const C* (&out)[R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out[r] = a + static_cast<int64_t>(min_i(row + r, rows - 1)) * lda;
}

// --- transposition -------------------------------------------------------------------------------------------

#if defined(__clang__) || __GNUC__ >= 12
#define AAH_SHUFFLE(I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AAH_SHUFFLE(I, a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

template <typename V, typename I, int W, int S, int... X>
AAH_INLINE V swap_low(V a, V b, std::integer_sequence<int, X...>) {
  return AAH_SHUFFLE(I, a, b, ((X & S) ? W + X - S : X)...);
}

template <typename V, typename I, int W, int S, int... X>
AAH_INLINE V swap_high(V a, V b, std::integer_sequence<int, X...>) {
  return AAH_SHUFFLE(I, a, b, ((X & S) ? W + X : X + S)...);
}

// Exchanges the off-diagonal S x S blocks; S = W/2, W/4, ... 1 together transpose.
template <typename C, int S>
AAH_INLINE void transpose_step(typename Vec<C>::V (&r)[Vec<C>::W]) {
  constexpr int W = Vec<C>::W;
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  typedef std::make_integer_sequence<int, W> Lanes;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & S) continue;
    const V a = r[i], b = r[i + S];
    r[i] = swap_low<V, I, W, S>(a, b, Lanes());
    r[i + S] = swap_high<V, I, W, S>(a, b, Lanes());
  }
  if constexpr (S > 1) transpose_step<C, S / 2>(r);
}

// dst[x * ldd + y] = factor * src[y * lds + x] for y < W (one vector of lanes) and x < n, n a multiple of W.
template <typename C>
AAH_INLINE void transpose_in(const C* src, int64_t lds, C* dst, int64_t ldd, int64_t n, C factor) {
  constexpr int W = Vec<C>::W;
  for (int64_t x = 0; x < n; x += W) {
    typename Vec<C>::V r[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = load<C>(src + i * lds + x) * factor;
    transpose_step<C, W / 2>(r);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store<C>(dst + (x + i) * ldd, r[i]);
  }
}

// dst[y * ldd + x] = factor[y] * src[x * lds + y]: the way back.
template <typename C>
AAH_INLINE void transpose_out(const C* src, int64_t lds, C* dst, int64_t ldd, int64_t n, typename Vec<C>::V factor) {
  constexpr int W = Vec<C>::W;
  for (int64_t x = 0; x < n; x += W) {
    typename Vec<C>::V r[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = load<C>(src + (x + i) * lds) * factor;
    transpose_step<C, W / 2>(r);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store<C>(dst + i * ldd + x, r[i]);
  }
}

}  // namespace
}  // namespace AAH_ISA
}  // namespace aah
