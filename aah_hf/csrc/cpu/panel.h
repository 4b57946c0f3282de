// Panels of queries: which keys they visit, masks, scores; and rows of tensors in and out of scratch memory.
// Part of attention_kernel.h.
#pragma once

#include "vector.h"

namespace aah {
namespace AAH_ISA {
namespace {

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

// --- rows and scratch memory ---------------------------------------------------------------------------------

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

}  // namespace
}  // namespace AAH_ISA
}  // namespace aah
