// The plain-C border between whoever has tensors (torch/ops.cpp, a test through ctypes) and the
// kernels, which know nothing of torch. Shared by host and device code: fixed-width integers only.
#pragma once

#include <stdint.h>

// Raise when AahParams changes: a caller built against another layout is refused, not misread.
#define AAH_PARAMS_VERSION 1u

// Positions are int32 in the kernels; larger windows and limits mean the same as this one.
#define AAH_UNLIMITED INT32_MAX

#define AAH_MAX_HEAD_DIM 256

#ifdef __cplusplus
extern "C" {
#endif

enum AahDtype { AAH_F32 = 0, AAH_F64 = 1, AAH_BF16 = 2, AAH_F16 = 3 };

enum AahStatus {
  AAH_OK = 0,
  AAH_ERROR_VERSION = 1,
  AAH_ERROR_DTYPE = 2,
  AAH_ERROR_SHAPE = 3,
  AAH_ERROR_WINDOW = 4,
  AAH_ERROR_POSITION = 5,
  AAH_ERROR_PACKING = 6,
  AAH_ERROR_MEMORY = 7,
  AAH_ERROR_SINKS = 8,
  AAH_ERROR_CACHE = 9,
  AAH_ERROR_RETENTION = 10,
  AAH_ERROR_ALIGNMENT = 11,  // CUDA only, as those below
  AAH_ERROR_CUDA = 12,       // aah_cuda_error() says what
  AAH_ERROR_DEVICE = 13,
};

// [batch, length, heads, head_dim]; strides in elements, head_dim contiguous.
typedef struct AahTensor {
  void* data;
  int64_t batch, length, head;
} AahTensor;

// "Accumulator type" below: double for AAH_F64, else float.
//
// A *sequence* is a batch row, or a packed document when cu_q is given. Its keys are at positions
// 0, 1, 2, ... and its first query at position q_start[s]; tokens outside [start[s], end[s]) are
// padding: never seen, seeing nothing. A negative start: that many first tokens are no longer among the keys.
typedef struct AahParams {
  uint32_t version;  // AAH_PARAMS_VERSION
  int32_t dtype;     // AahDtype of q, k, v, out and their gradients
  int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
  int64_t sequences;     // batch, or the number of packed documents
  const int32_t* window; // [q_heads], >= 1: keys per query, the query's own included
  const int32_t* q_start, *start, *end;  // [sequences] or null (0, 0, unlimited)
  // [sequences + 1] or null: documents as ranges of the flattened [batch * length] tokens, covering
  // all of them; no document crosses a batch row. Both or neither.
  const int32_t *cu_q, *cu_k;
  int32_t sinks;    // first real tokens of each sequence, seen in spite of the window
  int32_t limit;    // the model's own sliding window, which hides sinks too; AAH_UNLIMITED: none
  double scale;     // scores = scale * q . k
  double softcap;   // scores = softcap * tanh(scores / softcap); 0: none
  const void* sink_logits;  // [q_heads] of the accumulator type, or null
  AahTensor q, k, v, out;
  void* lse;  // [batch, q_heads, q_len] of the accumulator type, natural logarithm

  // Backward only. dk and dv have a row per KV head; d_sink_logits is [q_heads], accumulator type.
  AahTensor dout, dq, dk, dv;
  const void* dlse;  // like lse, or null
  void* d_sink_logits;
} AahParams;

// Raise when AahCacheParams changes.
#define AAH_CACHE_PARAMS_VERSION 1u

// Attention over a ragged ring cache (aah_cache.h), and appending to it. Positions are absolute, counted from the
// row's first token, padding included; row b's real tokens start at first[b].
typedef struct AahCacheParams {
  uint32_t version;  // AAH_CACHE_PARAMS_VERSION
  int32_t dtype;     // AahDtype of all tensors
  int64_t batch, q_len, slots, q_heads, kv_heads, head_dim;
  int64_t past;           // positions before the first new token
  const int32_t* offset;  // [kv_heads + 1]: KV head h owns the slots offset[h] .. offset[h + 1] - 1
  const int32_t* first;   // [batch], >= 0
  int32_t sinks;
  AahTensor k, v;              // the new tokens
  AahTensor k_cache, v_cache;  // [batch, slots, head_dim]: `length` is the stride of slots, `head` is unused

  // Attention only. The new tokens are not in the cache yet: one may take the slot of a key that an earlier one sees.
  int32_t limit;
  double scale, softcap;
  const int32_t* window;    // [q_heads]
  const void* sink_logits;  // [q_heads] of the accumulator type, or null
  AahTensor q, out;
  void* lse;  // [batch, q_heads, q_len] of the accumulator type
} AahCacheParams;

// How a kernel gets its threads: run(context, workers, body, argument) calls body(argument, i) once
// for every i < workers, in any order and on any threads, and returns when all have returned.
typedef void (*AahBody)(void* argument, int32_t worker);
typedef struct AahThreads {
  void* context;
  int32_t workers;
  void (*run)(void* context, int32_t workers, AahBody body, void* argument);
} AahThreads;

#define AAH_EXPORT __attribute__((visibility("default")))

// All return an AahStatus. The instruction set is chosen at run time.
AAH_EXPORT int aah_cpu_fwd(const AahParams* params, const AahThreads* threads);
AAH_EXPORT int aah_cpu_bwd(const AahParams* params, const AahThreads* threads);
AAH_EXPORT int aah_cpu_decode(const AahCacheParams* params, const AahThreads* threads);
// Nothing is written where the status is not AAH_OK.
AAH_EXPORT int aah_cpu_cache_append(const AahCacheParams* params, const AahThreads* threads);
AAH_EXPORT const char* aah_status_text(int status);
// The instruction set in use ("avx2", ...); AAH_CPU_ISA in the environment can ask for a lesser one.
AAH_EXPORT const char* aah_cpu_isa(void);

#ifdef __cplusplus
}
#endif
