// The rule of attention in C++: which keys may a query see? The Python twin is
// aah_hf/ops/reference.py `visible`; tests/test_native.py holds the two together.
//
// Host and device code both include this file and nothing else decides visibility.
#pragma once

#include "aah_int.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AAH_HD __host__ __device__ __forceinline__
#else
#define AAH_HD static inline
#endif

// Keys that one query sees: [sink_begin, sink_end) and [begin, end), in this order and disjoint.
struct AahSpan {
  int32_t sink_begin, sink_end, begin, end;
};

// pos: position of the query, >= 0, counted from the first key that is present. window >= 1: number of keys, the query's
// own included (FlashAttention's `window_size = (window - 1, 0)`). limit >= 1: the model's own window, which hides sinks
// too. [start, stop): the real tokens of the sequence; start is negative where a cache has dropped the first of them.
// No sum overflows: positions and windows are at most INT32_MAX, start is at least INT32_MIN / 2.
// All four results grow with pos, so the first and the last of some queries tell the hull of all.
AAH_HD AahSpan aah_visible(int32_t pos, int32_t window, int32_t sinks, int32_t limit, int32_t start, int32_t stop,
                           int32_t kv_len) {
  AahSpan span = {0, 0, 0, 0};
  if (pos < start || pos >= stop) return span;  // padding sees nothing
  if (window > limit) window = limit;
  const int32_t first = start > 0 ? start : 0, last = stop < kv_len ? stop : kv_len;
  const int32_t floor_window = pos - window + 1, floor_limit = pos - limit + 1;

  span.end = pos < last ? pos + 1 : last;  // causal; keys may also end before the queries do
  span.begin = floor_window > first ? floor_window : first;
  if (span.begin > span.end) span.begin = span.end;

  const int64_t sink_stop = static_cast<int64_t>(start) + sinks;
  span.sink_end = sink_stop < span.begin ? static_cast<int32_t>(sink_stop) : span.begin;
  if (span.sink_end < 0) span.sink_end = 0;
  span.sink_begin = floor_limit > first ? floor_limit : first;
  if (span.sink_begin > span.sink_end) span.sink_begin = span.sink_end;
  return span;
}

AAH_HD bool aah_sees(AahSpan span, int32_t key) {
  return (key >= span.begin && key < span.end) || (key >= span.sink_begin && key < span.sink_end);
}
