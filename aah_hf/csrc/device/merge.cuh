// Merges the partial results of tiles whose keys were split: each is a softmax over its keys, weighted by e^lse.
#pragma once

#include "forward.cuh"

namespace aah {

// Block: merge `block / groups`, rows `block % groups` * kMergeRows ...; `tile_queries` and `width` are the forward kernel's.
template <class T>
AAH_KERNEL void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ ForwardArguments a, int tile_queries, int width) {
  const int groups = (tile_queries + kMergeRows - 1) / kMergeRows;
  Place place;
  if (!find_place(a, a.merges, block_index() / groups, tile_queries, &place)) return;
  const Sequence& s = place.s;
  const int32_t head = place.entry.head, splits = place.entry.splits;
  const Rule rule = rule_of(a, s, head);
  const int first = block_index() % groups * kMergeRows;
  for (int row = first + warp_index(); row < first + kMergeRows; row += kMergeThreads / 32) {
    const int32_t query = place.q_begin + row;
    if (row >= tile_queries || query >= place.q_end) return;
    const float* lse = a.partial_lse + static_cast<int64_t>(place.partial) * tile_queries + row;
    float top = minus_infinity(), sum = 0;
    for (int i = 0; i < splits; ++i) top = fmaxf(top, lse[i * tile_queries]);
    const float base = top == minus_infinity() ? 0 : top;
    for (int i = 0; i < splits; ++i) sum += exp2_fast((lse[i * tile_queries] - base) * kLog2e);
    if (lane_index() == 0) {
      a.lse[lse_index(a, s, head, query)] = sum == 0 ? minus_infinity() : base + logf(sum);
    }
    const bool empty = sum == 0 || sees_nothing(rule.span(s.q_start + query));
    const float scale = empty ? 0 : 1 / sum;
    char* out = row_of(a.out, s.q_batch, s.q_offset + query, head, sizeof(T));
    for (int column = lane_index() * 2; column < a.dim; column += 64) {
      float x = 0, y = 0;
      for (int i = 0; i < splits && !empty; ++i) {
        const float weight = exp2_fast((lse[i * tile_queries] - base) * kLog2e) * scale;
        const float* o = a.partial_out +
                         (static_cast<int64_t>(place.partial + i) * tile_queries + row) * width + column;
        x += weight * o[0];
        y += weight * o[1];
      }
      store_pair<T>(out + column * static_cast<int>(sizeof(T)), x, y);
    }
  }
}

}  // namespace aah
