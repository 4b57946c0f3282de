// The CPU kernels, written once with GCC/Clang vector types and compiled once per instruction set: each isa_*.cpp
// defines AAH_ISA (a namespace), AAH_VECTOR_BYTES and AAH_ROWS and includes this file.
//
// Everything is computed transposed: scores^T = K Q^T has keys as rows and queries as vector lanes. So K and V are
// read in place as broadcast operands and never packed, maxima and sums over keys need no horizontal
// reduction, and a mask compares a key's number with per-lane bounds. Only Q is transposed on the way in and the
// output on the way out.
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
constexpr int64_t kForwardLanes = 192, kBackwardLanes = 192;  // queries per task, for head sizes up to 64

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
  typedef Vec<float>::I I;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const V shifted = x + magic;
  const V f = x - (shifted - magic);
  V p = f * 1.5345811968e-4f + 1.3399931385e-3f;
  p = p * f + 9.6184889587e-3f;
  p = p * f + 5.5503287766e-2f;
  p = p * f + 2.4022646891e-1f;
  p = p * f + 6.9314720574e-1f;
  p = p * f + 1.0f;
  const I bits = (I)p + ((I)shifted << 23);
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

// --- panels --------------------------------------------------------------------------------------------------

struct Range {
  int32_t begin, end;
};

AAH_INLINE Range clip(int32_t begin, int32_t end, int32_t low, int32_t high) {
  Range r = {max_i(begin, low), min_i(end, high)};
  if (r.begin > r.end) r.begin = r.end;
  return r;
}

// Up to kWide vectors of queries and the keys they see.
template <typename C>
struct Panel {
  typedef typename Vec<C>::Int Int;
  static constexpr int L = Vec<C>::L;
  int32_t first, lanes, vectors;
  bool any;  // at least one lane sees a key
  // Seen by some lane (sinks below `begin` only: above it the masks know them) ...
  int32_t sink_begin, sink_end, begin, end;
  // ... and from / up to here by every lane that sees anything.
  int32_t all_sink_begin, all_begin, all_end;
  Int lane_sink_begin[L], lane_sink_end[L], lane_begin[L], lane_end[L];
  C max[L], sum[L];  // forward: running maximum (base 2) and sum; backward: log-sum-exp (base 2) and delta
};

template <typename C>
AAH_INLINE bool sees_nothing(const Panel<C>& panel, int32_t l) {
  return panel.lane_begin[l] == panel.lane_end[l] && panel.lane_sink_begin[l] == panel.lane_sink_end[l];
}

AAH_INLINE int32_t query_of_lane(const Task& t, int32_t lane) { return t.q_begin + lane % (t.q_end - t.q_begin); }
AAH_INLINE int32_t head_of_lane(const Task& t, int32_t lane) { return t.head + lane / (t.q_end - t.q_begin); }

template <typename C>
AAH_INLINE void panel_bounds(const AahParams& p, const Sequence& s, const Task& t, int32_t first, int32_t total,
                             Panel<C>& panel) {
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  panel.first = first;
  panel.lanes = min_i(L, total - first);
  panel.vectors = (panel.lanes + W - 1) / W;
  panel.any = false;
  panel.sink_begin = panel.begin = AAH_UNLIMITED;
  panel.end = 0;
  panel.all_sink_begin = panel.all_begin = 0;
  panel.all_end = AAH_UNLIMITED;
  int32_t sink_end = 0;
  for (int32_t l = 0; l < L; ++l) {
    AahSpan span = {0, 0, 0, 0};
    if (l < panel.lanes) {
      const int32_t head = head_of_lane(t, first + l), query = query_of_lane(t, first + l);
      span = aah_visible(s.q_start + query, p.window[head], p.sinks, p.limit, s.start, s.stop, s.kv_len);
    }
    panel.lane_sink_begin[l] = span.sink_begin;
    panel.lane_sink_end[l] = span.sink_end;
    panel.lane_begin[l] = span.begin;
    panel.lane_end[l] = span.end;
    if (span.begin == span.end && span.sink_begin == span.sink_end) continue;
    panel.any = true;
    panel.sink_begin = min_i(panel.sink_begin, span.sink_begin);
    sink_end = max_i(sink_end, span.sink_end);
    panel.begin = min_i(panel.begin, span.begin);
    panel.end = max_i(panel.end, span.end);
    panel.all_sink_begin = max_i(panel.all_sink_begin, span.sink_begin);
    panel.all_begin = max_i(panel.all_begin, span.begin);
    panel.all_end = min_i(panel.all_end, span.end);
  }
  if (!panel.any) panel.sink_begin = panel.begin = panel.end = 0;
  panel.sink_end = min_i(sink_end, panel.begin);
  panel.sink_begin = min_i(panel.sink_begin, panel.sink_end);
}

// The keys of [low, high) that a panel visits: at most two ranges, sinks and band.
template <typename C>
AAH_INLINE int panel_ranges(const Panel<C>& panel, int32_t low, int32_t high, Range (&out)[2]) {
  int n = 0;
  const Range sinks = clip(panel.sink_begin, panel.sink_end, low, high);
  const Range band = clip(panel.begin, panel.end, low, high);
  if (sinks.begin < sinks.end) out[n++] = sinks;
  if (band.begin < band.end) out[n++] = band;
  if (n == 2 && sinks.end == band.begin) {
    out[0].end = band.end;
    n = 1;
  }
  return n;
}

// Hull of the rows of a tile that any panel visits.
template <typename C>
AAH_INLINE Range visited_rows(const Panel<C>* panels, int32_t count, int32_t low, int32_t high) {
  Range hull = {high, low};
  for (int32_t i = 0; i < count; ++i) {
    Range ranges[2];
    const int n = panel_ranges<C>(panels[i], low, high, ranges);
    if (n == 0) continue;
    hull.begin = min_i(hull.begin, ranges[0].begin);
    hull.end = max_i(hull.end, ranges[n - 1].end);
  }
  return hull;
}

// Must the keys of a range be compared with the lanes' bounds? Not where every lane sees every key.
template <typename C>
AAH_INLINE bool needs_mask(const Panel<C>& panel, Range r) {
  if (r.begin >= panel.all_begin) return r.end > panel.all_end;
  // below the band of the first lane: sinks, which every lane sees from all_sink_begin on
  return r.end > panel.sink_end || r.begin < panel.all_sink_begin;
}

template <typename C, int NV>
AAH_INLINE void lane_masks(const Panel<C>& panel, int32_t key, typename Vec<C>::I (&seen)[NV]) {
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W;
  const I j = I{} + static_cast<typename Vec<C>::Int>(key);
#pragma GCC unroll 3
  for (int v = 0; v < NV; ++v) {
    const I band = (j >= load_int<C>(panel.lane_begin + v * W)) & (j < load_int<C>(panel.lane_end + v * W));
    const I sink = (j >= load_int<C>(panel.lane_sink_begin + v * W)) & (j < load_int<C>(panel.lane_sink_end + v * W));
    seen[v] = band | sink;
  }
}

// scores^T block rows -> s[row * lds + lane]
template <typename C, int NV>
AAH_INLINE void scores(const C* k, int64_t ldk, int32_t n, const C* qt, int64_t depth, C* s, int64_t lds,
                       typename Vec<C>::V (&top)[NV]) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W;
  constexpr int R = NV == 1 ? kTall : kRows;
  for (int32_t row = 0; row < n; row += R) {
    const C* rows[R];
    V acc[R][NV];
    block_rows<C, R>(k, ldk, row, n, rows);
    multiply<C, R, NV, true>(rows, 0, qt, Vec<C>::L, depth, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (row + r < n) {
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) {
          store<C>(s + (row + r) * lds + v * W, acc[r][v]);
          top[v] = acc[r][v] > top[v] ? acc[r][v] : top[v];
        }
      }
    }
  }
}

// --- forward -------------------------------------------------------------------------------------------------

// One range of keys against one panel: scores, running softmax, output. Rows of k and v start at key range.begin.
template <typename C, int NV>
__attribute__((noinline)) void forward_range(Panel<C>& panel, const C* qt, C* ot, const C* k, const C* v, Range range,
                                             bool masked, C cap, int64_t dim, C* p) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const int32_t n = range.end - range.begin;
  V top[NV], base[NV], decay[NV], total[NV];
#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) top[x] = splat<C>(-infinity<C>());
  scores<C, NV>(k, dim, n, qt, dim, p, L, top);

  if (masked || cap != 0) {
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) top[x] = splat<C>(-infinity<C>());
    for (int32_t row = 0; row < n; ++row) {
      I seen[NV] = {};
      if (masked) lane_masks<C, NV>(panel, range.begin + row, seen);
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        V s = load<C>(p + row * L + x * W);
        if (cap != 0) s = tanh_vec(s) * cap;
        if (masked) s = seen[x] ? s : splat<C>(-infinity<C>());
        store<C>(p + row * L + x * W, s);
        top[x] = s > top[x] ? s : top[x];
      }
    }
  }

#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) {
    const V old = load<C>(panel.max + x * W);
    const V now = top[x] > old ? top[x] : old;
    // a lane that has seen nothing yet has maximum -inf: -inf - -inf is NaN, so subtract 0 there
    base[x] = now == splat<C>(-infinity<C>()) ? V{} : now;
    decay[x] = exp2_vec(old - base[x]);
    store<C>(panel.max + x * W, now);
    total[x] = V{};
  }
  for (int32_t row = 0; row < n; ++row) {
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) {
      const V e = exp2_vec(load<C>(p + row * L + x * W) - base[x]);
      store<C>(p + row * L + x * W, e);
      total[x] += e;
    }
  }
#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) store<C>(panel.sum + x * W, load<C>(panel.sum + x * W) * decay[x] + total[x]);

  constexpr int R = NV == 1 ? kTall : kRows;
  for (int64_t d = 0; d < dim; d += R) {
    const C* rows[R] = {v + d};
    V acc[R][NV];
    multiply<C, R, NV, false>(rows, dim, p, L, n, acc);
    // adding a tile's own sum, instead of carrying on with the running one, keeps rounding errors small
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        C* o = ot + (d + r) * L + x * W;
        store<C>(o, load<C>(o) * decay[x] + acc[r][x]);
      }
  }
}

// Scratch memory, handed out in order; every piece starts on a cache line. An arena that starts at 0 only adds up.
struct Arena {
  uintptr_t next;
  template <typename X>
  X* take(int64_t n) {
    const uintptr_t p = next;
    next += round_up(n * static_cast<int64_t>(sizeof(X)), 64);
    return reinterpret_cast<X*>(p);
  }
};

AAH_INLINE const char* row_of(const AahTensor& t, int32_t batch, int32_t token, int32_t head, int64_t bytes) {
  return static_cast<const char*>(t.data) + (batch * t.batch + token * t.length + head * t.head) * bytes;
}

// Rows [begin, end) of K or V. Rows that lie one behind the other in the accumulator type are used in place. Others
// are copied: halves need converting, and row strides that are multiples of 4096 bytes would map all rows of a
// tile to the same few cache sets.
template <typename C>
AAH_INLINE const C* key_rows(const AahParams& p, const AahTensor& t, const Sequence& s, int32_t head, int32_t begin,
                             int32_t end, C* copy) {
  const int64_t bytes = element_bytes(p.dtype);
  const char* base = row_of(t, s.k_batch, s.k_offset + begin, head, bytes);
  if (bytes == static_cast<int64_t>(sizeof(C)) && t.length == p.head_dim) return reinterpret_cast<const C*>(base);
  for (int32_t i = 0; i < end - begin; ++i) {
    load_row(p.dtype, base + i * t.length * bytes, copy + i * p.head_dim, p.head_dim);
  }
  return copy;
}

// Query rows first .. first + lanes of a task into rows of `width` (zero beyond head_dim and beyond the lanes).
template <typename C>
AAH_INLINE void query_rows(const AahParams& p, const Sequence& s, const Task& t, const AahTensor& x, int32_t first,
                           int32_t lanes, int32_t padded, C* rows, int64_t width) {
  const int64_t bytes = element_bytes(p.dtype);
  for (int32_t l = 0; l < padded; ++l) {
    C* row = rows + l * width;
    int64_t from = 0;
    if (l < lanes) {
      const int32_t head = head_of_lane(t, first + l), query = query_of_lane(t, first + l);
      load_row(p.dtype, row_of(x, s.q_batch, s.q_offset + query, head, bytes), row, p.head_dim);
      from = p.head_dim;
    }
    for (int64_t d = from; d < width; ++d) row[d] = 0;
  }
}

template <typename C>
AAH_INLINE C* lane_number(const AahParams& p, const Sequence& s, const Task& t, const void* base, int32_t lane) {
  const int64_t head = head_of_lane(t, lane), query = s.q_offset + query_of_lane(t, lane);
  return static_cast<C*>(const_cast<void*>(base)) + (static_cast<int64_t>(s.q_batch) * p.q_heads + head) * p.q_len + query;
}

template <typename C>
struct ForwardScratch {
  Panel<C>* panels;
  C *qt, *ot, *rows, *p, *k, *v;
  int64_t width;
  uintptr_t end;

  ForwardScratch(const AahParams& params, int32_t lanes, uintptr_t memory) {
    constexpr int W = Vec<C>::W, L = Vec<C>::L;
    Arena arena = {memory};
    const int64_t count = (lanes + L - 1) / L;
    width = round_up(params.head_dim, W);
    panels = arena.take<Panel<C>>(count);
    qt = arena.take<C>(count * width * L);
    ot = arena.take<C>(count * width * L);
    rows = arena.take<C>(W * width);
    p = arena.take<C>(kTile * L);
    k = arena.take<C>(kTile * params.head_dim);
    v = arena.take<C>(kTile * params.head_dim);
    end = arena.next;
  }
};

template <typename C>
void forward_task(const Call& call, const Task& t, char* memory) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const C log2e = static_cast<C>(1.4426950408889634), ln2 = static_cast<C>(0.6931471805599453);
  const AahParams& p = *call.params;
  const Sequence& s = call.sequences[t.sequence];
  const int32_t lanes = t.heads * (t.q_end - t.q_begin), count = (lanes + L - 1) / L;
  const int64_t dim = p.head_dim, bytes = element_bytes(p.dtype);
  const ForwardScratch<C> m(p, lanes, reinterpret_cast<uintptr_t>(memory));
  const int64_t panel_size = m.width * L;
  // Scores are kept in base 2, their scale folded into Q; a soft cap works on unscaled tanh arguments.
  const C cap = static_cast<C>(p.softcap) * log2e;
  const C factor = p.softcap != 0 ? static_cast<C>(p.scale / p.softcap) : static_cast<C>(p.scale) * log2e;
  const C* sink_logits = static_cast<const C*>(p.sink_logits);

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    panel_bounds<C>(p, s, t, i * L, lanes, panel);
    C *qt = m.qt + i * panel_size, *ot = m.ot + i * panel_size;
    for (int32_t v = 0; v < panel.vectors; ++v) {
      query_rows<C>(p, s, t, p.q, panel.first + v * W, panel.lanes - v * W, W, m.rows, m.width);
      transpose_in<C>(m.rows, m.width, qt + v * W, L, m.width, factor);
    }
    __builtin_memset(ot, 0, panel_size * sizeof(C));
    for (int32_t l = 0; l < L; ++l) {
      // a learned sink is a key without a value: it only starts the sum
      const bool sink = sink_logits && l < panel.lanes;
      panel.max[l] = sink ? sink_logits[head_of_lane(t, panel.first + l)] * log2e : -infinity<C>();
      panel.sum[l] = sink ? 1 : 0;
    }
  }

  for (int part = 0; part < 2; ++part) {
    const int32_t tile_begin = part ? t.band_tile : t.sink_tile, tile_end = part ? t.band_tile_end : t.sink_tile_end;
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      const int32_t low = tile * kTile, high = min_i(low + kTile, s.kv_len);
      const Range rows = visited_rows<C>(m.panels, count, low, high);
      if (rows.begin >= rows.end) continue;
      const C* k = key_rows<C>(p, p.k, s, t.kv_head, rows.begin, rows.end, m.k);
      const C* v = key_rows<C>(p, p.v, s, t.kv_head, rows.begin, rows.end, m.v);
      for (int32_t i = 0; i < count; ++i) {
        Range ranges[2];
        Panel<C>& panel = m.panels[i];
        const auto run = panel.vectors == 1   ? forward_range<C, 1>
                         : panel.vectors == 2 ? forward_range<C, 2>
                                              : forward_range<C, 3>;
        const int n = panel_ranges<C>(panel, low, high, ranges);
        for (int r = 0; r < n; ++r) {
          const int64_t skip = (ranges[r].begin - rows.begin) * dim;
          run(panel, m.qt + i * panel_size, m.ot + i * panel_size, k + skip, v + skip, ranges[r],
              needs_mask<C>(panel, ranges[r]), cap, dim, m.p);
        }
      }
    }
  }

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    for (int32_t v = 0; v < panel.vectors; ++v) {
      V inverse;
      for (int32_t x = 0; x < W; ++x) {
        const int32_t l = v * W + x;
        const bool empty = l >= panel.lanes || sees_nothing<C>(panel, l);
        inverse[x] = empty ? 0 : 1 / panel.sum[l];
        if (l >= panel.lanes) continue;
        const C top = panel.max[l], total = panel.sum[l];
        C lse;
        if (!empty) {
          lse = top * ln2 + static_cast<C>(sizeof(C) == 8 ? __builtin_log(total) : __builtin_logf(total));
        } else {
          lse = sink_logits ? sink_logits[head_of_lane(t, panel.first + l)] : -infinity<C>();
        }
        *lane_number<C>(p, s, t, p.lse, panel.first + l) = lse;
      }
      transpose_out<C>(m.ot + i * panel_size + v * W, L, m.rows, m.width, m.width, inverse);
      for (int32_t x = 0; x < min_i(W, panel.lanes - v * W); ++x) {
        const int32_t lane = panel.first + v * W + x;
        char* out = const_cast<char*>(
            row_of(p.out, s.q_batch, s.q_offset + query_of_lane(t, lane), head_of_lane(t, lane), bytes));
        if (sees_nothing<C>(panel, v * W + x)) {
          __builtin_memset(out, 0, dim * bytes);  // not 0 * garbage: another lane's key may hold NaN
        } else {
          store_row(p.dtype, m.rows + x * m.width, out, dim);
        }
      }
    }
  }
}

// --- backward ------------------------------------------------------------------------------------------------

// One range of keys against one panel: probabilities and gradients of the scores, both [row * ld + lane], and the
// range's share of dQ^T. d(out) is scaled beforehand, so gradients of the scores carry `scale` already.
template <typename C, int NV>
__attribute__((noinline)) void backward_range(const Panel<C>& panel, const C* qt, const C* dot, C* dqt, const C* k,
                                              const C* v, Range range, bool masked, C cap, int64_t dim, C* p, C* ds,
                                              int64_t ld) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const int32_t n = range.end - range.begin;
  V unused[NV] = {};
  scores<C, NV>(k, dim, n, qt, dim, p, ld, unused);

  for (int32_t row = 0; row < n; ++row) {
    I seen[NV] = {};
    if (masked) lane_masks<C, NV>(panel, range.begin + row, seen);
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) {
      V s = load<C>(p + row * ld + x * W);
      if (cap != 0) {
        const V t = tanh_vec(s);
        store<C>(ds + row * ld + x * W, static_cast<C>(1) - t * t);  // the soft cap's derivative waits where dS will be
        s = t * cap;
      }
      V e = exp2_vec(s - load<C>(panel.max + x * W));
      if (masked) e = seen[x] ? e : V{};
      store<C>(p + row * ld + x * W, e);
    }
  }

  constexpr int R = NV == 1 ? kTall : kRows;
  for (int32_t row = 0; row < n; row += R) {
    const C* rows[R];
    V acc[R][NV];
    block_rows<C, R>(v, dim, row, n, rows);
    multiply<C, R, NV, true>(rows, 0, dot, L, dim, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (row + r < n) {
#pragma GCC unroll 3
        for (int x = 0; x < NV; ++x) {
          const int64_t at = (row + r) * ld + x * W;
          V g = load<C>(p + at) * (acc[r][x] - load<C>(panel.sum + x * W));
          if (cap != 0) g = g * load<C>(ds + at);
          store<C>(ds + at, g);
        }
      }
    }
  }

  for (int64_t d = 0; d < dim; d += R) {
    const C* rows[R] = {k + d};
    V acc[R][NV];
    multiply<C, R, NV, false>(rows, dim, ds, ld, n, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        C* o = dqt + (d + r) * L + x * W;
        store<C>(o, load<C>(o) + acc[r][x]);
      }
  }
}

// out[row, d] = sum over lanes of weight[row * ldw + lane] * x[lane * width + d], rows of one block, NV vectors of d.
template <typename C, int NV>
AAH_INLINE void weighted_rows(const C* weight, int64_t ldw, int32_t row, int32_t n, const C* x, int64_t width,
                              int64_t lanes, C* out) {
  constexpr int W = Vec<C>::W;
  const C* rows[kRows];
  typename Vec<C>::V acc[kRows][NV];
  block_rows<C, kRows>(weight, ldw, row, n, rows);
  multiply<C, kRows, NV, true>(rows, 0, x, width, lanes, acc);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (row + r < n) {
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) store<C>(out + (row + r) * width + v * W, acc[r][v]);
    }
  }
}

// The same over all of head_dim; block b of rows sums over the lanes touched[b] only.
template <typename C>
__attribute__((noinline)) void weighted_sum(const C* weight, int64_t ldw, int32_t n, const Range* touched, const C* x,
                                            int64_t width, C* out) {
  constexpr int W = Vec<C>::W;
  const int64_t vectors = width / W;
  int64_t step;
  for (int64_t d = 0; d < vectors; d += step) {
    const int64_t left = vectors - d;
    step = left == 4 ? 2 : left < kWide ? left : kWide;
    for (int32_t row = 0; row < n; row += kRows) {
      const Range lanes = touched[row / kRows];
      const C *w = weight + lanes.begin, *from = x + lanes.begin * width + d * W;
      const int64_t depth = lanes.end - lanes.begin;
      if (step == 3) weighted_rows<C, 3>(w, ldw, row, n, from, width, depth, out + d * W);
      if (step == 2) weighted_rows<C, 2>(w, ldw, row, n, from, width, depth, out + d * W);
      if (step == 1) weighted_rows<C, 1>(w, ldw, row, n, from, width, depth, out + d * W);
    }
  }
}

template <typename C>
struct BackwardScratch {
  Panel<C>* panels;
  C *qt, *dot, *dqt, *q, *dout, *p, *ds, *k, *v, *dk, *dv;
  int64_t width, ld;
  uintptr_t end;

  BackwardScratch(const AahParams& params, int32_t lanes, uintptr_t memory) {
    constexpr int W = Vec<C>::W, L = Vec<C>::L;
    Arena arena = {memory};
    const int64_t count = (lanes + L - 1) / L;
    width = round_up(params.head_dim, W);
    // an odd number of cache lines: the rows of a block of P then lie in different cache sets
    ld = round_up(count * L, 64 / sizeof(C)) | (64 / static_cast<int64_t>(sizeof(C)));
    panels = arena.take<Panel<C>>(count);
    qt = arena.take<C>(count * width * L);
    dot = arena.take<C>(count * width * L);
    dqt = arena.take<C>(count * width * L);
    q = arena.take<C>(count * L * width);
    dout = arena.take<C>(count * L * width);
    p = arena.take<C>(kTile * ld);
    ds = arena.take<C>(kTile * ld);
    k = arena.take<C>(kTile * params.head_dim);
    v = arena.take<C>(kTile * params.head_dim);
    dk = arena.take<C>(kTile * width);
    dv = arena.take<C>(kTile * width);
    end = arena.next;
  }
};

template <typename C>
AAH_INLINE void add_rows(const AahParams& p, const Sequence& s, int32_t kv_head, Range rows, const C* from,
                         int64_t width, void* to) {
  const int64_t dim = p.head_dim;
  for (int32_t i = 0; i < rows.end - rows.begin; ++i) {
    const int64_t token = static_cast<int64_t>(s.k_batch) * p.kv_len + s.k_offset + rows.begin + i;
    C* out = static_cast<C*>(to) + (token * p.kv_heads + kv_head) * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] += from[i * width + d];
  }
}

template <typename C>
void backward_task(const Call& call, const Task& t, int64_t task_index, char* memory) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const C log2e = static_cast<C>(1.4426950408889634);
  const AahParams& p = *call.params;
  const Sequence& s = call.sequences[t.sequence];
  const int32_t lanes = t.q_end - t.q_begin, count = (lanes + L - 1) / L;
  const int64_t dim = p.head_dim, bytes = element_bytes(p.dtype);
  const BackwardScratch<C> m(p, lanes, reinterpret_cast<uintptr_t>(memory));
  const int64_t panel_size = m.width * L;
  const C scale = static_cast<C>(p.scale), cap = static_cast<C>(p.softcap) * log2e;
  const C factor = p.softcap != 0 ? static_cast<C>(p.scale / p.softcap) : scale * log2e;
  const C* sink_logits = static_cast<const C*>(p.sink_logits);
  C sink_gradient = 0;

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    panel_bounds<C>(p, s, t, i * L, lanes, panel);
    C *q = m.q + i * L * m.width, *dout = m.dout + i * L * m.width;
    query_rows<C>(p, s, t, p.q, panel.first, panel.lanes, L, q, m.width);
    query_rows<C>(p, s, t, p.dout, panel.first, panel.lanes, L, dout, m.width);
    C* out = m.dqt;  // dQ^T is not in use yet: room for the rows of the output
    query_rows<C>(p, s, t, p.out, panel.first, panel.lanes, L, out, m.width);
    for (int32_t l = 0; l < L; ++l) {
      panel.max[l] = infinity<C>();  // probability 0 for lanes without a query or without keys
      panel.sum[l] = 0;
      if (l >= panel.lanes) continue;
      const C lse = *lane_number<C>(p, s, t, p.lse, panel.first + l);
      const C dlse = p.dlse ? *lane_number<C>(p, s, t, p.dlse, panel.first + l) : 0;
      if (sees_nothing<C>(panel, l)) {
        if (sink_logits) sink_gradient += dlse;  // its log-sum-exp is the sink logit itself
        for (int64_t d = 0; d < m.width; ++d) q[l * m.width + d] = dout[l * m.width + d] = 0;
        continue;
      }
      // dS = P (dP - delta): delta is the same for all keys, the learned sink (dP = 0) among them
      V sum = {};
      for (int64_t d = 0; d < m.width; d += W) {
        sum += load<C>(out + l * m.width + d) * load<C>(dout + l * m.width + d);
      }
      C delta = -dlse;
      for (int x = 0; x < W; ++x) delta += sum[x];
      panel.max[l] = lse * log2e;
      panel.sum[l] = delta * scale;
      if (sink_logits) {
        const C x = sink_logits[t.head] - lse;
        sink_gradient -= static_cast<C>(sizeof(C) == 8 ? __builtin_exp(x) : __builtin_expf(x)) * delta;
      }
    }
    for (int32_t v = 0; v < panel.vectors; ++v) {
      transpose_in<C>(q + v * W * m.width, m.width, m.qt + i * panel_size + v * W, L, m.width, factor);
      transpose_in<C>(dout + v * W * m.width, m.width, m.dot + i * panel_size + v * W, L, m.width, scale);
    }
  }
  if (call.d_sink_partial) static_cast<C*>(call.d_sink_partial)[task_index] = sink_gradient;
  __builtin_memset(m.dqt, 0, count * panel_size * sizeof(C));

  int64_t ticket = t.ticket_base;
  for (int part = 0; part < 2; ++part) {
    const int32_t tile_begin = part ? t.band_tile : t.sink_tile, tile_end = part ? t.band_tile_end : t.sink_tile_end;
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      const int32_t low = tile * kTile, high = min_i(low + kTile, s.kv_len);
      const Range rows = visited_rows<C>(m.panels, count, low, high);
      const int32_t n = max_i(rows.end - rows.begin, 0);
      if (n > 0) {
        const C* k = key_rows<C>(p, p.k, s, t.kv_head, rows.begin, rows.end, m.k);
        const C* v = key_rows<C>(p, p.v, s, t.kv_head, rows.begin, rows.end, m.v);
        Range touched[kTile];
        for (int32_t b = 0; b * kRows < n; ++b) touched[b] = Range{AAH_UNLIMITED, 0};
        for (int32_t i = 0; i < count; ++i) {
          const Panel<C>& panel = m.panels[i];
          Range ranges[2];
          const int parts = panel_ranges<C>(panel, low, high, ranges);
          const int64_t lane_bytes = panel.vectors * W * sizeof(C);
          int32_t done = rows.begin;  // rows of this panel that are written
          for (int r = 0; r <= parts; ++r) {
            // keys between the ranges are not seen by this panel, but others of its block of rows may be
            const int32_t next = r < parts ? ranges[r].begin : rows.end;
            for (int32_t j = done; j < next; ++j) {
              __builtin_memset(m.p + (j - rows.begin) * m.ld + i * L, 0, lane_bytes);
              __builtin_memset(m.ds + (j - rows.begin) * m.ld + i * L, 0, lane_bytes);
            }
            if (r == parts) break;
            done = ranges[r].end;
            const int64_t skip = ranges[r].begin - rows.begin;
            const auto run = panel.vectors == 1   ? backward_range<C, 1>
                             : panel.vectors == 2 ? backward_range<C, 2>
                                                  : backward_range<C, 3>;
            run(panel, m.qt + i * panel_size, m.dot + i * panel_size, m.dqt + i * panel_size, k + skip * dim,
                v + skip * dim, ranges[r], needs_mask<C>(panel, ranges[r]), cap, dim, m.p + skip * m.ld + i * L,
                m.ds + skip * m.ld + i * L, m.ld);
            for (int64_t b = skip / kRows; b * kRows < done - rows.begin; ++b) {
              touched[b].begin = min_i(touched[b].begin, panel.first);
              touched[b].end = panel.first + panel.lanes;
            }
          }
        }
        for (int32_t b = 0; b * kRows < n; ++b) touched[b].begin = min_i(touched[b].begin, touched[b].end);
        weighted_sum<C>(m.p, m.ld, n, touched, m.dout, m.width, m.dv);
        weighted_sum<C>(m.ds, m.ld, n, touched, m.q, m.width, m.dk);
      }

      int32_t* turn = call.turns + s.turn_base + static_cast<int64_t>(t.kv_head) * ((s.kv_len + kTile - 1) / kTile) + tile;
      const int32_t mine = call.tickets[ticket++];
      while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine) call.relax();
      if (n > 0) {
        add_rows<C>(p, s, t.kv_head, rows, m.dk, m.width, call.dk);
        add_rows<C>(p, s, t.kv_head, rows, m.dv, m.width, call.dv);
      }
      __atomic_store_n(turn, mine + 1, __ATOMIC_RELEASE);
    }
  }

  for (int32_t i = 0; i < count; ++i) {
    const Panel<C>& panel = m.panels[i];
    for (int32_t v = 0; v < panel.vectors; ++v) {
      C* out = m.q;  // done with: room for rows of dQ
      transpose_out<C>(m.dqt + i * panel_size + v * W, L, out, m.width, m.width, splat<C>(1));
      for (int32_t x = 0; x < min_i(W, panel.lanes - v * W); ++x) {
        const int32_t lane = panel.first + v * W + x;
        store_row(p.dtype, out + x * m.width,
                  const_cast<char*>(row_of(p.dq, s.q_batch, s.q_offset + query_of_lane(t, lane), t.head, bytes)), dim);
      }
    }
  }
}

// --- table ---------------------------------------------------------------------------------------------------

// Lanes per task: as many as keep its share of Q, dQ and probabilities in a second-level cache.
int32_t queries_per_task(const AahParams* p, bool backward) {
  const int32_t lanes = p->dtype == AAH_F64 ? Vec<double>::L : Vec<float>::L;
  const int64_t budget = backward ? kBackwardLanes : kForwardLanes;
  const int64_t wanted = budget * 64 / max_i(static_cast<int32_t>(p->head_dim), 64);
  return max_i(static_cast<int32_t>(wanted) / lanes, 1) * lanes;
}

int64_t scratch_bytes(const AahParams* p, bool backward, int32_t lanes) {
  if (p->dtype == AAH_F64) {
    return backward ? BackwardScratch<double>(*p, lanes, 0).end : ForwardScratch<double>(*p, lanes, 0).end;
  }
  return backward ? BackwardScratch<float>(*p, lanes, 0).end : ForwardScratch<float>(*p, lanes, 0).end;
}

void forward(const Call* call, const Task* t, char* scratch) {
  if (call->params->dtype == AAH_F64) {
    forward_task<double>(*call, *t, scratch);
  } else {
    forward_task<float>(*call, *t, scratch);
  }
}

void backward(const Call* call, const Task* t, int64_t index, char* scratch) {
  if (call->params->dtype == AAH_F64) {
    backward_task<double>(*call, *t, index, scratch);
  } else {
    backward_task<float>(*call, *t, index, scratch);
  }
}

void store_any(const AahParams* p, const void* src, void* dst, int64_t n) {
  if (p->dtype == AAH_F64) {
    store_row(p->dtype, static_cast<const double*>(src), dst, n);
  } else {
    store_row(p->dtype, static_cast<const float*>(src), dst, n);
  }
}

}  // namespace

const Kernels kKernels = {AAH_ISA_NAME, queries_per_task, scratch_bytes, forward, backward, store_any};

}  // namespace AAH_ISA
}  // namespace aah
