// The forward kernel. A block of threads computes one work entry: a tile of queries of one head, over the keys it sees.
//
// A warp holds 16 or 32 queries: their scores, probabilities and output stay in its registers, and probabilities become
// the operand of the second product as they lie. Tiles of K and V pass through two stages of shared memory; one
// barrier per tile says both that its rows have arrived and that the stage of the tile before is free again.
#pragma once

#include "softmax.cuh"
#include "tile.cuh"

namespace aah {

template <class T, int kDim>
struct ForwardShape {
  static constexpr Shape kShape = shape_of(sizeof(T), kDim);
  static constexpr int kRowBlocks = kShape.row_blocks, kKeys = kShape.keys, kThreads = kShape.threads();
  static constexpr int kQueries = kShape.queries(), kWarpQueries = 16 * kRowBlocks;
  static constexpr int kStride = tile_stride(sizeof(T), kDim);
};

AAH_DEVICE int64_t lse_index(const ForwardArguments& a, const Sequence& s, int32_t head, int32_t query) {
  return (static_cast<int64_t>(s.q_batch) * a.q_heads + head) * a.q_len + s.q_offset + query;
}

AAH_DEVICE char* row_of(const Rows& t, int32_t batch, int32_t token, int32_t head, int bytes) {
  return t.data + (batch * t.batch + token * t.length + head * t.head) * bytes;
}

AAH_DEVICE bool sees_nothing(AahSpan s) { return s.begin >= s.end && s.sink_begin >= s.sink_end; }

// Rows of a warp's output to global memory, each thread 16 bytes: through the warp's own rows of the Q tile, which no one
// reads any more.
template <class T, int kDim>
AAH_DEVICE void store_output(const ForwardArguments& a, const Sequence& s, int32_t head, int32_t first_query, char* rows,
                             float (&o)[ForwardShape<T, kDim>::kRowBlocks][kDim / 8][4]) {
  typedef ForwardShape<T, kDim> F;
  constexpr int kBytes = sizeof(T), kChunks = kDim * kBytes / 16;
  const int lane = lane_index();
  sync_warp();  // the other lanes' reads of Q
  AAH_UNROLL
  for (int m = 0; m < F::kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      char* row = rows + (m * 16 + half * 8 + lane / 4) * F::kStride + lane % 4 * 2 * kBytes;
      AAH_UNROLL
      for (int n = 0; n < kDim / 8; ++n) store_shared_pair<T>(row + n * 8 * kBytes, o[m][n][2 * half], o[m][n][2 * half + 1]);
    }
  }
  sync_warp();
  for (int i = lane; i < F::kWarpQueries * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_query + row >= s.q_len || chunk * (16 / kBytes) >= a.dim) continue;
    store_global_chunk(row_of(a.out, s.q_batch, s.q_offset + first_query + row, head, kBytes) + chunk * 16,
                       load_shared_chunk(rows + row * F::kStride + chunk * 16));
  }
}

template <class T, int kDim>
AAH_KERNEL void __launch_bounds__(shape_of(sizeof(T), kDim).threads())
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  typedef ForwardShape<T, kDim> F;
  constexpr int kRowBlocks = F::kRowBlocks, kKeys = F::kKeys, kBytes = sizeof(T);
  const Entry entry = a.entries[block_index()];
  Sequence s;
  int32_t q_begin;
  if (!locate(a, entry, F::kQueries, &s, &q_begin)) return;
  const int32_t head = entry.head, kv_head = head / a.group;
  const Rule rule = {a.window[head], a.sinks, a.limit, s.start, s.stop, s.kv_len};

  char* const q_tile = shared_memory();
  char* const stages = q_tile + F::kQueries * F::kStride;  // K, V of stage 0, K, V of stage 1
  constexpr int kTileBytes = kKeys * F::kStride;

  // The block's keys, and those of this warp: it sits out tiles that only other warps' queries see.
  const int32_t q_end = smaller(q_begin + F::kQueries, s.q_len);
  const Queries block = real_queries(s, q_begin, q_end);
  const int32_t warp_begin = smaller(q_begin + warp_index() * F::kWarpQueries, q_end);
  const Queries warp = real_queries(s, warp_begin, smaller(warp_begin + F::kWarpQueries, q_end));
  Hull hull = {0, 0, 0, 0, 0, 0}, warp_hull = hull;
  if (block.begin < block.end) {
    hull = hull_of(rule.span(s.q_start + block.begin), rule.span(s.q_start + block.end - 1));
  }
  if (warp.begin < warp.end) {
    warp_hull = hull_of(rule.span(s.q_start + warp.begin), rule.span(s.q_start + warp.end - 1));
  }
  const Tiles tiles = tiles_of(hull, kKeys);
  const int32_t first = static_cast<int32_t>(static_cast<int64_t>(tiles.count()) * entry.split / entry.splits);
  const int32_t last = static_cast<int32_t>(static_cast<int64_t>(tiles.count()) * (entry.split + 1) / entry.splits);

  const auto load_keys = [&](int32_t i) {
    const int32_t key = tiles.at(i) * kKeys;
    const auto real = [&](int row) { return overlaps(hull, key + row, key + row + 1); };
    char* stage = stages + (i - first) % 2 * (2 * kTileBytes);
    load_rows<T, kDim, kKeys, F::kThreads>(stage, a.k, row_of(a.k, s.k_batch, s.k_offset + key, kv_head, kBytes), a.dim, real);
    load_rows<T, kDim, kKeys, F::kThreads>(stage + kTileBytes, a.v,
                                           row_of(a.v, s.k_batch, s.k_offset + key, kv_head, kBytes), a.dim, real);
    copy_async_commit();
  };

  float o[kRowBlocks][kDim / 8][4];
  Softmax<kRowBlocks> softmax;
  // A learned sink is a key without a value: it only starts the sum, in one of the row's threads and one split.
  const bool has_sink = a.sink_logits != nullptr && entry.split == 0;
  const float sink = has_sink ? a.sink_logits[head] * kLog2e : minus_infinity();
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int n = 0; n < kDim / 8; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    softmax.top[m][0] = softmax.top[m][1] = sink;
    softmax.sum[m][0] = softmax.sum[m][1] = has_sink && lane_index() % 4 == 0 ? 1 : 0;
  }

  char* const warp_rows = q_tile + warp_index() * F::kWarpQueries * F::kStride;
  const int32_t position = s.q_start + q_begin + warp_index() * F::kWarpQueries;  // of the warp's first row
  if (first < last) {
    load_rows<T, kDim, F::kQueries, F::kThreads>(
        q_tile, a.q, row_of(a.q, s.q_batch, s.q_offset + q_begin, head, kBytes), a.dim,
        [&](int row) { return q_begin + row >= block.begin && q_begin + row < block.end; });
    load_keys(first);  // in one group with Q
  }
  const bool transform = a.softcap != 0 || !(a.factor > 0);
  const float factor = transform ? 1 : a.factor;
  for (int32_t i = first; i < last; ++i) {
    copy_async_wait<0>();
    sync_block();
    if (i + 1 < last) load_keys(i + 1);  // after the barrier: every warp is done with that stage
    const int32_t key = tiles.at(i) * kKeys;
    if (!overlaps(warp_hull, key, key + kKeys)) continue;
    const char* stage = stages + (i - first) % 2 * (2 * kTileBytes);
    float scores[kRowBlocks][kKeys / 8][4];
    multiply_queries_keys<T, kDim, kRowBlocks, kKeys>(scores, warp_rows, stage);
    if (transform) transform_scores(scores, a.factor, a.softcap);
    if (key < warp_hull.all_begin || key + kKeys > warp_hull.all_end) mask_scores(scores, rule, position, key);
    update_softmax(scores, factor, softmax, o);
    multiply_probabilities_values<T, kDim, kRowBlocks, kKeys>(o, scores, stage + kTileBytes);
  }

  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_index() * F::kWarpQueries + m * 16 + half * 8 + lane_index() / 4;
      const int32_t query = q_begin + row;
      const float sum = row_sum(softmax.sum[m][half]);
      // not 0 * garbage: another row's key may hold NaN
      const bool empty = query >= q_end || sum == 0 || sees_nothing(rule.span(s.q_start + query));
      const float scale = empty ? 0 : 1 / sum;
      AAH_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        AAH_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = o[m][n][2 * half + i];
          x = empty ? 0 : x * scale;
        }
      }
      if (query >= q_end || lane_index() % 4 != 0) continue;
      const float lse = sum == 0 ? minus_infinity() : softmax.top[m][half] * kLn2 + logf(sum);
      if (entry.splits == 1) {
        a.lse[lse_index(a, s, head, query)] = lse;
      } else {
        a.partial_lse[static_cast<int64_t>(entry.partial + entry.split) * F::kQueries + row] = lse;
      }
    }
  }
  if (entry.splits == 1) {
    store_output<T, kDim>(a, s, head, q_begin + warp_index() * F::kWarpQueries, warp_rows, o);
    return;
  }
  float* partial = a.partial_out + static_cast<int64_t>(entry.partial + entry.split) * F::kQueries * kDim;
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_index() * F::kWarpQueries + m * 16 + half * 8 + lane_index() / 4;
      if (q_begin + row >= q_end) continue;
      AAH_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        store_pair<float>(partial + row * kDim + n * 8 + lane_index() % 4 * 2, o[m][n][2 * half], o[m][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace aah
