// The plain-C border of the CUDA kernels: aah_params.h says what a call means, this file what differs on a GPU.
//
// In an AahParams that is given to a function below
//   - q, k, v, out, lse, sink_logits, q_start, start, end, cu_q, cu_k are pointers into memory of the current device;
//     nothing behind them is ever read by the host;
//   - window is a HOST pointer: the work list is made from it, without waiting for the device;
//   - dtype is AAH_F32, AAH_BF16 or AAH_F16; head_dim a multiple of 8 up to AAH_MAX_HEAD_DIM;
//   - rows of q, k, v and out start at multiples of 16 bytes, that is: base pointers are aligned to 16 bytes and
//     batch, length and head strides are multiples of 16 bytes (else AAH_ERROR_ALIGNMENT: copy the tensor);
//   - values that only the device knows (q_start, start, end, cu_q, cu_k) cannot be checked here. Kernels clamp what
//     they derive from cu_q and cu_k to the tensors' sizes, so that nonsense gives wrong numbers but touches no other
//     memory; q_start < 0 counts as 0.
#pragma once

#include "aah_params.h"

#ifdef __cplusplus
extern "C" {
#endif

// Device memory that aah_cuda_fwd needs beyond its results, in bytes: partial results where few queries make it worth
// splitting keys between blocks, else 0. Depends on shapes, windows and the current device's number of
// multiprocessors only, never on what the device holds. Returns an AahStatus.
//
// max_q, max_k: longest packed document's queries and keys, as a hint for the schedule (any value is correct);
// q_len and kv_len where nothing is packed.
AAH_EXPORT int aah_cuda_fwd_workspace(const AahParams* params, int64_t max_q, int64_t max_k, int64_t* bytes);

// Enqueues the forward pass on `stream` (a cudaStream_t of the current device) and returns an AahStatus without waiting.
//
// workspace: at least as many bytes as aah_cuda_fwd_workspace says for the same arguments, aligned to 16 bytes, in
// stream order (torch's caching allocator will do); null where that is 0.
//
// One kernel for all heads, and one small one to merge where keys are split. The first call with given shapes, windows
// and device builds its work list, keeps it (a bounded cache, least recently used first out) and copies it to the
// device on a stream of its own; further calls do not allocate, copy or wait. All calls may be captured into CUDA
// graphs: a list that a capture has used is kept for good, since the graph holds its address.
AAH_EXPORT int aah_cuda_fwd(const AahParams* params, int64_t max_q, int64_t max_k, void* workspace, void* stream);

// The last CUDA error of this thread behind an AAH_ERROR_CUDA, as text; "" if there was none.
AAH_EXPORT const char* aah_cuda_error(void);

// Number of usable devices (compute capability 8.0 or newer); 0 without a driver. Never fails.
AAH_EXPORT int aah_cuda_devices(void);

#ifdef __cplusplus
}
#endif
