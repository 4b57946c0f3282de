// Registers aah::fwd for CUDA tensors, under the schema of ops.cpp. Only in libraries that have kernels for GPUs; such a
// library loads into every torch, also into one that was built without CUDA.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdio>
#include <tuple>

#include "../include/aah_cuda.h"
#include "arguments.h"

// In libtorch_cuda, which a CPU build of torch lacks: weak, and of default visibility, or the linker would settle it as
// missing for good.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

void check_cuda(int status) {
  STD_TORCH_CHECK(status == AAH_OK, "aah: ", aah_status_text(status), status == AAH_ERROR_CUDA ? ": " : "",
                  status == AAH_ERROR_CUDA ? aah_cuda_error() : "");
}

// Kernels read 16 bytes at a time: what is not aligned so, like a slice that begins in the middle of a row, is copied.
void align(Tensor& t) {
  make_rows(t);
  if (t.numel() == 0) return;
  const int64_t step = t.scalar_type() == ScalarType::Float ? 4 : 8;
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < t.dim() - 1; ++i) aligned = aligned && (t.size(i) == 1 || t.stride(i) % step == 0);
  if (!aligned) t = torch::stable::clone(torch::stable::contiguous(t));
}

// The stride of a dimension of size 1 is never used and may be any number, also one that is not aligned.
void forget_single_strides(AahParams& p) {
  for (AahTensor* t : {&p.q, &p.k, &p.v, &p.out}) {
    const bool keys = t == &p.k || t == &p.v;
    if (p.batch == 1) t->batch = 0;
    if ((keys ? p.kv_len : p.q_len) == 1) t->length = 0;
    if ((keys ? p.kv_heads : p.q_heads) == 1) t->head = 0;
  }
}

std::tuple<Tensor, Tensor> fwd_cuda(Tensor q, Tensor k, Tensor v, Tensor window, MaybeTensor sink_logits,
                                    MaybeTensor q_start, MaybeTensor cu_q, MaybeTensor cu_k, MaybeTensor start,
                                    MaybeTensor end, int64_t max_q, int64_t max_k, int64_t sinks, int64_t limit,
                                    double scale, double softcap) {
  STD_TORCH_CHECK(q.is_cuda() && q.dim() == 4, "aah: q must be a CUDA tensor [batch, length, heads, head_dim]");
  STD_TORCH_CHECK(q.scalar_type() != ScalarType::Double, "aah: the CUDA kernels take float32, bfloat16 and float16");
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "aah: this torch was built without CUDA");
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);  // before any copy is made
  for (Tensor* t : {&q, &k, &v}) align(*t);
  AahParams p = common(q, k, v, window, sink_logits, q_start, cu_q, cu_k, start, end, sinks, limit, scale, softcap);
  Tensor out = torch::stable::new_empty(q, {p.batch, p.q_len, p.q_heads, p.head_dim});
  Tensor lse = torch::stable::new_empty(q, {p.batch, p.q_heads, p.q_len}, ScalarType::Float);
  p.out = describe(out, "out", q);
  p.lse = lse.data_ptr();
  forget_single_strides(p);
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  int64_t bytes = 0;
  check_cuda(aah_cuda_fwd_workspace(&p, max_q, max_k, &bytes));
  // torch's allocator gives it to nobody else before the work that this stream has been given is done
  Tensor workspace = torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
  check_cuda(aah_cuda_fwd(&p, max_q, max_k, bytes > 0 ? workspace.data_ptr() : nullptr, stream));
  return {out, lse};
}

const char* describe_cuda() {
  static char text[256];
  int runtime = 0, driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;  // 0 as well where there is no driver
  std::snprintf(text, sizeof text, "{\"targets\": \"%s\", \"runtime\": %d, \"driver\": %d, \"devices\": %d}",
                AAH_CUDA_TARGETS, runtime, driver, aah_cuda_devices());
  return text;
}

const bool announced = (aah::cuda_info = &describe_cuda, true);

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(aah, CUDA, m) { m.impl("fwd", TORCH_BOX(&fwd_cuda)); }
