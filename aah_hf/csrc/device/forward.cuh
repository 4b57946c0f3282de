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

// Where a block works. Found before the loop over keys and again behind it, rather than kept: registers are what is scarce.
struct Place {
  Entry entry;
  int32_t partial;  // index of the first split's partial result
  Sequence s;
  int32_t q_begin, q_end;
};

// The place of the index-th block of a list: entry after entry, each for every batch row.
AAH_DEVICE bool find_place(const ForwardArguments& a, const Entry* list, int32_t index, int32_t tile_queries, Place* place) {
  const int32_t row = index % a.rows;
  place->entry = list[index / a.rows];
  place->partial = row * a.partials + place->entry.partial;
  if (!locate(a, place->entry, row, tile_queries, &place->s, &place->q_begin)) return false;
  place->q_end = smaller(place->q_begin + tile_queries, place->s.q_len);
  return true;
}

AAH_DEVICE Rule rule_of(const ForwardArguments& a, const Sequence& s, int32_t head) {
  return {a.window[head], a.sinks, a.limit, s.start, s.stop, s.kv_len};
}

AAH_DEVICE int64_t lse_index(const ForwardArguments& a, const Sequence& s, int32_t head, int32_t query) {
  return (static_cast<int64_t>(s.q_batch) * a.q_heads + head) * a.q_len + s.q_offset + query;
}

AAH_DEVICE char* row_of(const Rows& t, int32_t batch, int32_t token, int32_t head, int bytes) {
  return t.data + (batch * t.batch + token * t.length + head * t.head) * bytes;
}

// A learned sink is a key without a value: it only starts the sum, of one split.
AAH_DEVICE float sink_of(const ForwardArguments& a, const Entry& e) {
  return a.sink_logits && e.split == 0 ? a.sink_logits[e.head] : minus_infinity();
}

AAH_DEVICE bool sees_nothing(AahSpan s) { return s.begin >= s.end && s.sink_begin >= s.sink_end; }

// The hull of those of the queries [begin, end) that are real tokens; empty if none is.
AAH_DEVICE Hull hull_of_queries(const Sequence& s, const Rule& rule, int32_t begin, int32_t end) {
  const Queries real = real_queries(s, begin, end);
  if (real.begin >= real.end) return {0, 0, 0, 0, 0, 0};
  return hull_of(rule.span(s.q_start + real.begin), rule.span(s.q_start + real.end - 1));
}

// Rows of a warp's output to global memory, each thread 16 bytes: through the warp's own rows of the Q tile, which no one
// reads any more.
template <class T, int kDim>
AAH_DEVICE void store_output(const ForwardArguments& a, const Place& place, int first_row, char* rows,
                             const float (&o)[ForwardShape<T, kDim>::kRowBlocks][kDim / 8][4]) {
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
      for (int n = 0; n < kDim / 8; ++n) {
        store_shared_pair<T>(row + n * 8 * kBytes, o[m][n][2 * half], o[m][n][2 * half + 1]);
      }
    }
  }
  sync_warp();
  for (int i = lane; i < F::kWarpQueries * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int32_t query = place.q_begin + first_row + row;
    if (query >= place.q_end || chunk * (16 / kBytes) >= a.dim) continue;
    store_global_chunk(
        row_of(a.out, place.s.q_batch, place.s.q_offset + query, place.entry.head, kBytes) + chunk * 16,
        load_shared_chunk(rows + row * F::kStride + chunk * 16));
  }
}

// Divides the output by the sums and stores it and the log-sum-exp: the result, or a partial one where keys are split.
template <class T, int kDim>
AAH_DEVICE void finish(const ForwardArguments& a, const Softmax<ForwardShape<T, kDim>::kRowBlocks>& softmax,
                       float (&o)[ForwardShape<T, kDim>::kRowBlocks][kDim / 8][4]) {
  typedef ForwardShape<T, kDim> F;
  Place place;
  if (!find_place(a, a.entries, block_index(), F::kQueries, &place)) return;
  const Rule rule = rule_of(a, place.s, place.entry.head);
  const int first_row = warp_index() * F::kWarpQueries;
  const bool whole = place.entry.splits == 1;
  const int64_t partial = static_cast<int64_t>(place.partial + place.entry.split) * F::kQueries;
  AAH_UNROLL
  for (int m = 0; m < F::kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane_index() / 4;
      const int32_t query = place.q_begin + row;
      const bool there = query < place.q_end;
      const float sum = row_sum(softmax.sum[m][half]);
      // By the rule and not by the sum: padding has had no mask where all others of its warp see a whole tile, and
      // 0 * garbage will not do since another row's key may hold NaN.
      const bool blind = !there || sees_nothing(rule.span(place.s.q_start + query));
      const bool empty = blind || sum == 0;  // a part of the keys may hold none that the row sees
      const float scale = empty ? 0 : 1 / sum;
      if (there && lane_index() % 4 == 0) {
        float* lse = whole ? a.lse + lse_index(a, place.s, place.entry.head, query) : a.partial_lse + partial + row;
        *lse = blind      ? sink_of(a, place.entry)
               : sum == 0 ? minus_infinity()
                          : softmax.top[m][half] * kLn2 + logf(sum);
      }
      AAH_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        float &x = o[m][n][2 * half], &y = o[m][n][2 * half + 1];
        x = empty ? 0 : x * scale;
        y = empty ? 0 : y * scale;
        if (there && !whole) store_pair<float>(a.partial_out + (partial + row) * kDim + n * 8 + lane_index() % 4 * 2, x, y);
      }
    }
  }
  if (whole) store_output<T, kDim>(a, place, first_row, shared_memory() + first_row * F::kStride, o);
}

template <class T, int kDim>
AAH_KERNEL void __launch_bounds__(shape_of(sizeof(T), kDim).threads(), 1)  // 1: all registers may be used
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  typedef ForwardShape<T, kDim> F;
  constexpr int kRowBlocks = F::kRowBlocks, kKeys = F::kKeys, kBytes = sizeof(T), kTileBytes = kKeys * F::kStride;
  Place place;
  if (!find_place(a, a.entries, block_index(), F::kQueries, &place)) return;
  const Sequence& s = place.s;
  const int32_t head = place.entry.head, q_begin = place.q_begin;
  const Rule rule = rule_of(a, s, head);
  const int first_row = warp_index() * F::kWarpQueries;

  // The block's keys, and those of this warp: it sits out tiles that only other warps' queries see.
  const Hull hull = hull_of_queries(s, rule, q_begin, place.q_end);
  const Hull warp_hull = hull_of_queries(s, rule, smaller(q_begin + first_row, place.q_end),
                                         smaller(q_begin + first_row + F::kWarpQueries, place.q_end));
  const Tiles tiles = tiles_of(hull, kKeys);
  const int64_t count = tiles.count();
  const int32_t first = static_cast<int32_t>(count * place.entry.split / place.entry.splits);
  const int32_t last = static_cast<int32_t>(count * (place.entry.split + 1) / place.entry.splits);

  char* const q_tile = shared_memory();
  char* const stages = q_tile + F::kQueries * F::kStride;  // K and V of stage 0, K and V of stage 1
  const char* const keys = row_of(a.k, s.k_batch, s.k_offset, head / a.group, kBytes);
  const char* const values = row_of(a.v, s.k_batch, s.k_offset, head / a.group, kBytes);
  const auto stage_of = [&](int32_t i) { return stages + (i & 1) * (2 * kTileBytes); };
  const auto load_tile = [&](int32_t i) {
    const int32_t key = tiles.at(i) * kKeys;
    const auto real = [&](int row) { return overlaps(hull, key + row, key + row + 1); };
    load_rows<T, kDim, kKeys, F::kThreads>(stage_of(i), a.k, keys + key * a.k.length * kBytes, a.dim, real);
    load_rows<T, kDim, kKeys, F::kThreads>(stage_of(i) + kTileBytes, a.v, values + key * a.v.length * kBytes, a.dim, real);
    copy_async_commit();
  };

  float o[kRowBlocks][kDim / 8][4];
  Softmax<kRowBlocks> softmax;
  const float sink = sink_of(a, place.entry) * kLog2e;
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int n = 0; n < kDim / 8; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    softmax.top[m][0] = softmax.top[m][1] = sink;
    softmax.sum[m][0] = softmax.sum[m][1] = sink != minus_infinity() && lane_index() % 4 == 0 ? 1 : 0;  // one of four lanes
  }

  if (first < last) {
    const Queries real = real_queries(s, q_begin, place.q_end);
    load_rows<T, kDim, F::kQueries, F::kThreads>(
        q_tile, a.q, row_of(a.q, s.q_batch, s.q_offset + q_begin, head, kBytes), a.dim,
        [&](int row) { return q_begin + row >= real.begin && q_begin + row < real.end; });
    load_tile(first);  // in one group with Q
  }
  const bool transform = a.softcap != 0 || !(a.factor > 0);
  const float factor = transform ? 1 : a.factor;
  const int32_t position = s.q_start + q_begin + first_row;
  for (int32_t i = first; i < last; ++i) {
    copy_async_wait<0>();
    sync_block();
    if (i + 1 < last) load_tile(i + 1);  // after the barrier: every warp is done with that stage
    const int32_t key = tiles.at(i) * kKeys;
    // less exact than overlaps(), which would keep one more register alive through the loop
    if (key >= warp_hull.sink_end && (key >= warp_hull.end || key + kKeys <= warp_hull.begin)) continue;
    float scores[kRowBlocks][kKeys / 8][4];
    multiply_queries_keys<T, kDim, kRowBlocks, kKeys>(scores, q_tile + first_row * F::kStride, stage_of(i));
    if (transform) transform_scores(scores, a.factor, a.softcap);
    if (key < warp_hull.all_begin || key + kKeys > warp_hull.all_end) mask_scores(scores, rule, position, key);
    update_softmax(scores, factor, softmax, o);
    multiply_probabilities_values<T, kDim, kRowBlocks, kKeys>(o, scores, stage_of(i) + kTileBytes);
  }
  finish<T, kDim>(a, softmax, o);
}

}  // namespace aah
