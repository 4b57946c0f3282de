// What the host hands to the kernels, and the shapes of tiles. For host and device.
#pragma once

#include "../include/aah_int.h"
#include "../include/aah_rule.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AAH_CONSTEXPR __host__ __device__ constexpr
#else
#define AAH_CONSTEXPR constexpr
#endif

namespace aah {

// A block of threads computes a tile of `queries` of one head, visiting tiles of `keys` keys.
struct Shape {
  int warps, row_blocks, keys;  // row_blocks: groups of 16 queries per warp
  AAH_CONSTEXPR int threads() const { return 32 * warps; }
  AAH_CONSTEXPR int queries() const { return 16 * row_blocks * warps; }
};

// The one place that says how tiles are shaped.
// - 32 queries per warp (two row blocks) halve what a warp reads of K and V from shared memory per multiplication: with 16,
//   shared memory is as busy as the tensor cores. Above 128 the output of 32 rows no longer fits the registers.
// - Q and two stages of K and V must fit the 99 KiB of compute capability 8.6, 8.9 and 12.0, rows padded (tile.cuh).
AAH_CONSTEXPR Shape shape_of(int element_bytes, int dim) {
  if (element_bytes == 4) return dim <= 96 ? Shape{4, 1, 32} : dim <= 192 ? Shape{4, 1, 16} : Shape{2, 1, 16};
  return dim <= 64 ? Shape{4, 2, 64} : dim <= 128 ? Shape{4, 2, 32} : Shape{4, 1, 32};
}

// Head sizes that kernels exist for; others are padded with zeros, in shared memory only.
AAH_CONSTEXPR int padded_dim(int dim) {
  return dim <= 64 ? 64 : dim <= 80 ? 80 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256;
}

// A row of a tile in shared memory, in bytes. One chunk of 16 bytes is never used: it makes the stride an odd number of
// chunks, so that 8 rows at the same column lie in different banks, for every head size (swizzling by XOR needs rows of a
// power of two and is wrong for 80 and 96).
AAH_CONSTEXPR int tile_stride(int element_bytes, int dim) { return dim * element_bytes + 16; }

AAH_CONSTEXPR int shared_bytes(int element_bytes, int dim) {
  return tile_stride(element_bytes, dim) *
         (shape_of(element_bytes, dim).queries() + 4 * shape_of(element_bytes, dim).keys);
}

constexpr int kMaxSplits = 64;

// A block of the merge kernel takes so many queries, a warp one at a time.
constexpr int kMergeThreads = 128, kMergeRows = 16;

// One block's work: a tile of queries of one head, or, where `splits` > 1, the `split`-th part of the keys it visits. As far as
// the host knows, all batch rows are alike, so a list is for one row and every entry is done for each of them.
struct Entry {
  int32_t tile;  // index of the tile in its row; packed: a slot, see locate() in sequence.cuh
  int32_t head;
  int32_t split, splits;
  int32_t partial;  // index of the first split's partial result, within a row's
};

// In elements; the last dimension is contiguous.
struct Rows {
  char* data;
  int64_t batch, length, head;
};

struct ForwardArguments {
  Rows q, k, v, out;
  float* lse;
  const float* sink_logits;
  const int32_t *window, *q_start, *start, *end, *cu_q, *cu_k;
  const Entry *entries, *merges;  // merges: one per tile whose keys are split
  int32_t rows, partials;         // batch rows, or 1 where documents are packed; partial results of each
  float* partial_out;             // [rows, partials, queries, padded head size]
  float* partial_lse;             // [rows, partials, queries], natural logarithm
  int32_t batch, q_len, kv_len, q_heads, group, dim, sequences;
  int32_t sinks, limit;
  float factor;   // scores = factor * q . k, in base 2; with a soft cap: the argument of tanh
  float softcap;  // base 2; 0: none
};

}  // namespace aah
