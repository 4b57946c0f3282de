// The CPU kernels, written once with GCC/Clang vector types and compiled once per instruction set: each isa_*.cpp
// defines AAH_ISA (a namespace), AAH_VECTOR_BYTES and AAH_ROWS and includes this file.
//
// Everything is computed transposed: scores^T = K Q^T has keys as rows and queries as vector lanes. So K and V are
// read in place as broadcast operands and never packed, maxima and sums over keys need no horizontal
// reduction, and a mask compares a key's number with per-lane bounds. Only Q is transposed on the way in and the
// output on the way out.
#pragma once

#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace aah {
namespace AAH_ISA {
namespace {

constexpr int64_t kForwardLanes = 192, kBackwardLanes = 192;  // queries per task, for head sizes up to 64

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

int64_t decode_scratch_bytes(const AahCacheParams* p) {
  return static_cast<int64_t>(p->dtype == AAH_F64 ? DecodeScratch<double>(*p, 0).end : DecodeScratch<float>(*p, 0).end);
}

int64_t decode_partial_bytes(const AahCacheParams* p) {
  return static_cast<int64_t>(p->dtype == AAH_F64 ? Partial<double>(*p, 0).end : Partial<float>(*p, 0).end);
}

void decode_chunk(const DecodeCall* call, int32_t chunk, char* scratch) {
  if (call->params->dtype == AAH_F64) {
    decode_chunk<double>(*call, chunk, scratch);
  } else {
    decode_chunk<float>(*call, chunk, scratch);
  }
}

void decode_combine(const DecodeCall* call, int32_t list, char* scratch) {
  if (call->params->dtype == AAH_F64) {
    decode_combine<double>(*call, list, scratch);
  } else {
    decode_combine<float>(*call, list, scratch);
  }
}

}  // namespace

const Kernels kKernels = {AAH_ISA_NAME, queries_per_task, scratch_bytes, forward, backward, store_any,
                          decode_scratch_bytes, decode_partial_bytes, decode_chunk, decode_combine};

}  // namespace AAH_ISA
}  // namespace aah
