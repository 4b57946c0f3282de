// From AahParams to what the kernels take: checks, arguments, and the problem that plan.h makes a work list for. Pure C++,
// shared by the launcher and the emulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../include/aah_check.h"
#include "../include/aah_cuda.h"
#include "plan.h"

namespace aah {

inline int element_bytes(int32_t dtype) { return dtype == AAH_F32 ? 4 : 2; }

inline bool aligned(const AahTensor& t, int bytes) {
  const int64_t step = 16 / bytes;
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.batch % step == 0 && t.length % step == 0 && t.head % step == 0;
}

// An AahStatus: everything the host can know about a call.
inline int check(const AahParams& p) {
  if (int status = aah_check_sizes(p, INT32_MAX - 2 * kMaxTile)) return status;
  if (p.dtype != AAH_F32 && p.dtype != AAH_BF16 && p.dtype != AAH_F16) return AAH_ERROR_DTYPE;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  if (p.cu_q && p.sequences == 0) return AAH_ERROR_PACKING;
  const int bytes = element_bytes(p.dtype);
  if (!aligned(p.q, bytes) || !aligned(p.out, bytes)) return AAH_ERROR_ALIGNMENT;
  if (p.kv_len > 0 && (!aligned(p.k, bytes) || !aligned(p.v, bytes))) return AAH_ERROR_ALIGNMENT;
  return AAH_OK;
}

inline Rows rows_of(const AahTensor& t) { return {static_cast<char*>(t.data), t.batch, t.length, t.head}; }

// All but window, entries, merges and the partial results, which lie in memory of the launcher.
inline ForwardArguments arguments_of(const AahParams& p) {
  ForwardArguments a = {};
  a.q = rows_of(p.q);
  a.k = rows_of(p.k);
  a.v = rows_of(p.v);
  a.out = rows_of(p.out);
  a.lse = static_cast<float*>(p.lse);
  a.sink_logits = static_cast<const float*>(p.sink_logits);
  a.q_start = p.q_start;
  a.start = p.start;
  a.end = p.end;
  a.cu_q = p.cu_q;
  a.cu_k = p.cu_k;
  a.batch = static_cast<int32_t>(p.batch);
  a.q_len = static_cast<int32_t>(p.q_len);
  a.kv_len = static_cast<int32_t>(p.kv_len);
  a.q_heads = static_cast<int32_t>(p.q_heads);
  a.group = static_cast<int32_t>(p.q_heads / p.kv_heads);
  a.dim = static_cast<int32_t>(p.head_dim);
  a.sequences = static_cast<int32_t>(p.sequences);
  a.sinks = p.sinks;
  a.limit = p.limit;
  const double log2e = 1.4426950408889634;
  a.factor = static_cast<float>(p.softcap != 0 ? p.scale / p.softcap : p.scale * log2e);
  a.softcap = static_cast<float>(p.softcap * log2e);
  return a;
}

// The next number that has three leading bits of its own: at most an eighth more. Lists are made for rounded lengths, so that
// growing ones share them; entries beyond the queries there are end at once.
inline int64_t rounded_up(int64_t n) {
  int64_t step = 1;
  while (n / step > 15) step *= 2;
  return (n + step - 1) / step * step;
}

inline Problem problem_of(const AahParams& p, int64_t max_q, int64_t max_k, int processors) {
  Problem x = {};
  x.shape = shape_of(element_bytes(p.dtype), padded_dim(static_cast<int>(p.head_dim)));
  const int64_t queries = x.shape.queries(), keys = x.shape.keys, most = INT32_MAX - 2 * kMaxTile;
  const auto tiles = [&](int64_t n, int64_t tile) { return std::min(rounded_up((n + tile - 1) / tile) * tile, most); };
  x.batch = p.batch;
  x.q_heads = p.q_heads;
  x.window = p.window;
  x.sinks = p.sinks;
  x.limit = p.limit;
  x.processors = std::max(processors, 1);
  x.q_len = tiles(p.q_len, queries);
  x.kv_len = tiles(p.kv_len, keys);
  if (p.cu_q) {
    x.documents = rounded_up(p.sequences);
    x.max_q = tiles(std::min(std::max<int64_t>(max_q, 1), p.q_len), queries);
    x.max_k = tiles(std::min(std::max<int64_t>(max_k, 1), std::max<int64_t>(p.kv_len, 1)), keys);
  } else {
    x.queries_last = p.q_start != nullptr;
  }
  return x;
}

}  // namespace aah
