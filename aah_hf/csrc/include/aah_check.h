// What no kernel can do without: the checks of AahParams that CPUs and GPUs share. Host only.
#pragma once

#include "aah_params.h"

// An AahStatus of sizes, windows and numbers. most: the largest size that the kernels' positions hold.
static inline int aah_check_sizes(const AahParams& p, int64_t most) {
  if (p.version != AAH_PARAMS_VERSION) return AAH_ERROR_VERSION;
  for (int64_t n : {p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.head_dim, p.sequences}) {
    if (n < 0 || n > most) return AAH_ERROR_SHAPE;
  }
  if (p.kv_heads < 1 || p.q_heads < 1 || p.q_heads % p.kv_heads != 0) return AAH_ERROR_SHAPE;
  if (p.head_dim < 8 || p.head_dim % 8 != 0 || p.head_dim > AAH_MAX_HEAD_DIM) return AAH_ERROR_SHAPE;
  if (p.sinks < 0 || p.limit < 1) return AAH_ERROR_SINKS;
  if (!p.window) return AAH_ERROR_WINDOW;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    if (p.window[h] < 1) return AAH_ERROR_WINDOW;
  }
  if ((p.cu_q == nullptr) != (p.cu_k == nullptr)) return AAH_ERROR_PACKING;
  if (!p.cu_q && p.sequences != p.batch) return AAH_ERROR_SHAPE;
  if (p.cu_q && (p.batch * p.q_len > most || p.batch * p.kv_len > most)) return AAH_ERROR_SHAPE;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  if (!p.q.data || !p.out.data || !p.lse) return AAH_ERROR_SHAPE;
  if (p.kv_len > 0 && (!p.k.data || !p.v.data)) return AAH_ERROR_SHAPE;
  return AAH_OK;
}
