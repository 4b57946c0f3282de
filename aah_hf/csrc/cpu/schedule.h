// What the driver decides and the per-ISA kernels carry out. No std:: here or in attention_kernel.h: the same
// inline function compiled for two instruction sets would be merged by the linker into either one.
#pragma once

#include "../include/aah_params.h"
#include "../include/aah_rule.h"

namespace aah {

// Keys are visited in tiles at fixed positions of their sequence: [i * kTile, (i + 1) * kTile).
constexpr int32_t kTile = 64;

// A batch row or a packed document.
struct Sequence {
  int32_t q_batch, q_offset, q_len;
  int32_t k_batch, k_offset, kv_len;
  int32_t q_start, start, stop;
  int64_t turn_base;  // backward: index of this sequence's first (KV head, tile) in Call::turns
};

// One entry of the work list: some queries of one head; or, when queries are few, of all heads of one KV head,
// which then share the vectors. Lane l is query q_begin + l % (q_end - q_begin) of head + l / (q_end - q_begin).
struct Task {
  int32_t sequence, head, heads, kv_head;
  int32_t q_begin, q_end;
  // Tiles to visit, in this order: those holding sinks only, then the band.
  int32_t sink_tile, sink_tile_end, band_tile, band_tile_end;
  int64_t cost;
  int64_t ticket_base;  // backward: index of the first visited tile's ticket in Call::tickets
};

struct Call {
  const AahParams* params;
  const Sequence* sequences;
  // Backward. Tasks add into dk and dv in the order of the work list, whatever thread runs them: ticket t of a tile
  // waits until the tile's turn is t. Hence equal sums for every number of threads.
  const int32_t* tickets;
  int32_t* turns;
  void (*relax)(void);
  // Gradients of k and v in the accumulator type, contiguous [batch, kv_len, kv_heads, head_dim].
  void *dk, *dv;
  void* d_sink_partial;  // one number of the accumulator type per task
};

// Decoding. Keys that lie one behind the other, in memory and in position; `index` numbers the keys of a KeyList.
struct KeyRun {
  const char *k, *v;
  int64_t k_stride, v_stride;  // bytes
  int32_t index, count;
};

// All keys that exist for one row's KV head, by position: the cache's sinks, its ring in one or two pieces, the new
// tokens. They are numbered without gaps: i is rank i up to `kept`, and rank i - kept + oldest from there.
struct KeyList {
  int32_t batch, kv_head, first;
  int32_t kept, oldest, count;
  int32_t chunk_begin, chunk_end;
  int32_t run_count;
  KeyRun runs[4];
};

// Keys begin .. end - 1 of a list: what one thread does at a time.
struct Chunk {
  int32_t list, begin, end;
};

struct DecodeCall {
  const AahCacheParams* params;
  const KeyList* lists;
  const Chunk* chunks;
  char* partials;  // partial_bytes per chunk: maximum, sum and output of every query of the group
  int64_t partial_bytes;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  int32_t (*queries_per_task)(const AahParams*, bool backward);  // lanes that a task may hold
  int64_t (*scratch_bytes)(const AahParams*, bool backward, int32_t lanes);
  void (*forward)(const Call*, const Task*, char* scratch);
  void (*backward)(const Call*, const Task*, int64_t task_index, char* scratch);
  // dst [n] of params->dtype from src of the accumulator type
  void (*store_row)(const AahParams*, const void* src, void* dst, int64_t n);
  int64_t (*decode_scratch_bytes)(const AahCacheParams*);
  int64_t (*decode_partial_bytes)(const AahCacheParams*);
  void (*decode_chunk)(const DecodeCall*, int32_t chunk, char* scratch);
  void (*decode_combine)(const DecodeCall*, int32_t list, char* scratch);
};

}  // namespace aah

extern "C" {
const aah::Kernels* aah_kernels_baseline(void);
#if defined(__x86_64__)
const aah::Kernels* aah_kernels_avx2(void);
const aah::Kernels* aah_kernels_avx512(void);
#endif
}
