// Tensors -> AahParams, with everything checked that can be checked without reading device memory. For the files that
// register operators, of which each compiles its own copy.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "../include/aah_params.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
typedef std::optional<Tensor> MaybeTensor;

inline int32_t dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return AAH_F32;
    case ScalarType::Double: return AAH_F64;
    case ScalarType::BFloat16: return AAH_BF16;
    case ScalarType::Half: return AAH_F16;
    default: STD_TORCH_CHECK(false, "aah: q must be float32, float64, bfloat16 or float16");
  }
  return -1;
}

// The kernels want a contiguous last dimension and take any other strides. Gradients of sums come expanded, and
// compilers choose strides of their own, so what does not fit is copied.
inline void make_rows(Tensor& t) {
  if (t.dim() > 0 && t.numel() > 0 && t.stride(t.dim() - 1) != 1) t = torch::stable::contiguous(t);
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() ? b.is_cpu() : a.is_cuda() && b.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline AahTensor describe(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.dim() == 4, "aah: ", name, " must have 4 dimensions [batch, length, heads, head_dim], not ", t.dim());
  STD_TORCH_CHECK(same_device(t, like), "aah: ", name, " must be on the device of q");
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), "aah: ", name, " must have the dtype of q");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline void check_shape(const Tensor& t, const char* name, int64_t batch, int64_t length, int64_t heads, int64_t dim) {
  STD_TORCH_CHECK(t.size(0) == batch && t.size(1) == length && t.size(2) == heads && t.size(3) == dim, "aah: ", name,
                  " is [", t.size(0), ", ", t.size(1), ", ", t.size(2), ", ", t.size(3), "], expected [", batch, ", ",
                  length, ", ", heads, ", ", dim, "]");
}

inline const int32_t* int_vector(const MaybeTensor& t, const char* name, int64_t n, bool right_device) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && t->dim() == 1 && t->is_contiguous(), "aah: ", name,
                  " must be a contiguous int32 vector");
  STD_TORCH_CHECK(right_device, "aah: ", name, " is on the wrong device: window belongs on the CPU, all else where q is");
  STD_TORCH_CHECK(n < 0 || t->size(0) == n, "aah: ", name, " has ", t->size(0), " numbers, expected ", n);
  return static_cast<const int32_t*>(t->data_ptr());
}

inline ScalarType accumulator(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void* accumulator_data(const Tensor& t, const char* name, const Tensor& q, const std::vector<int64_t>& shape) {
  bool fits = same_device(t, q) && t.is_contiguous() && t.scalar_type() == accumulator(q) &&
              t.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
  STD_TORCH_CHECK(fits, "aah: ", name,
                  " must be contiguous, of the expected shape, on the device of q, float32, or float64 where q is");
  return t.data_ptr();
}

inline AahParams common(Tensor& q, Tensor& k, Tensor& v, const Tensor& window, const MaybeTensor& sink_logits,
                 const MaybeTensor& q_start, const MaybeTensor& cu_q, const MaybeTensor& cu_k, const MaybeTensor& start,
                 const MaybeTensor& end, int64_t sinks, int64_t limit, double scale, double softcap) {
  for (Tensor* t : {&q, &k, &v}) make_rows(*t);
  AahParams p = {};
  p.version = AAH_PARAMS_VERSION;
  p.dtype = dtype_of(q);
  p.q = describe(q, "q", q);
  p.k = describe(k, "k", q);
  p.v = describe(v, "v", q);
  p.batch = q.size(0);
  p.q_len = q.size(1);
  p.q_heads = q.size(2);
  p.head_dim = q.size(3);
  p.kv_len = k.size(1);
  p.kv_heads = k.size(2);
  check_shape(k, "k", p.batch, p.kv_len, p.kv_heads, p.head_dim);
  check_shape(v, "v", p.batch, p.kv_len, p.kv_heads, p.head_dim);
  p.sequences = cu_q.has_value() ? cu_q->size(0) - 1 : p.batch;
  STD_TORCH_CHECK(p.sequences >= 0, "aah: cu_q must not be empty");
  // Schedules are made from the windows by the host, on a GPU too; the other vectors are read by kernels only.
  p.window = int_vector(MaybeTensor(window), "window", p.q_heads, window.is_cpu());
  const auto vector = [&q](const MaybeTensor& t, const char* name, int64_t n) {
    return int_vector(t, name, n, t.has_value() && same_device(*t, q));
  };
  p.q_start = vector(q_start, "q_start", p.sequences);
  p.start = vector(start, "start", p.sequences);
  p.end = vector(end, "end", p.sequences);
  p.cu_q = vector(cu_q, "cu_q", p.sequences + 1);
  p.cu_k = vector(cu_k, "cu_k", p.sequences + 1);
  const int64_t most = AAH_UNLIMITED;
  STD_TORCH_CHECK(sinks >= 0 && limit >= 1, "aah: sinks must be at least 0 and limit at least 1");
  p.sinks = static_cast<int32_t>(sinks < most ? sinks : most);
  p.limit = static_cast<int32_t>(limit < most ? limit : most);
  p.scale = scale;
  p.softcap = softcap;
  if (sink_logits.has_value()) p.sink_logits = accumulator_data(*sink_logits, "sink_logits", q, {p.q_heads});
  return p;
}

}  // namespace

// What aah::info says about GPUs; null in a library without code for them. Set when ops_cuda.cpp is loaded.
namespace aah {
extern const char* (*cuda_info)();
}
