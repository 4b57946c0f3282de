// Registers the operators of aah:: with PyTorch through its stable ABI: one library serves torch 2.10 and newer.
// The kernels behind it know nothing of torch; this file turns tensors into AahParams.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "../include/aah_params.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
typedef std::optional<Tensor> MaybeTensor;

int32_t dtype_of(const Tensor& t) {
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
void make_rows(Tensor& t) {
  if (t.dim() > 0 && t.numel() > 0 && t.stride(t.dim() - 1) != 1) t = torch::stable::contiguous(t);
}

AahTensor describe(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.dim() == 4, "aah: ", name, " must have 4 dimensions [batch, length, heads, head_dim], not ", t.dim());
  STD_TORCH_CHECK(t.is_cpu(), "aah: ", name, " must be on the CPU");
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), "aah: ", name, " must have the dtype of q");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

void check_shape(const Tensor& t, const char* name, int64_t batch, int64_t length, int64_t heads, int64_t dim) {
  STD_TORCH_CHECK(t.size(0) == batch && t.size(1) == length && t.size(2) == heads && t.size(3) == dim, "aah: ", name,
                  " is [", t.size(0), ", ", t.size(1), ", ", t.size(2), ", ", t.size(3), "], expected [", batch, ", ",
                  length, ", ", heads, ", ", dim, "]");
}

const int32_t* int_vector(const MaybeTensor& t, const char* name, int64_t n) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->is_cpu() && t->scalar_type() == ScalarType::Int && t->dim() == 1 && t->is_contiguous(), "aah: ",
                  name, " must be a contiguous int32 vector on the CPU");
  STD_TORCH_CHECK(n < 0 || t->size(0) == n, "aah: ", name, " has ", t->size(0), " numbers, expected ", n);
  return static_cast<const int32_t*>(t->data_ptr());
}

ScalarType accumulator(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void* accumulator_data(const Tensor& t, const char* name, const Tensor& q, const std::vector<int64_t>& shape) {
  bool fits = t.is_cpu() && t.is_contiguous() && t.scalar_type() == accumulator(q) &&
              t.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
  STD_TORCH_CHECK(fits, "aah: ", name, " must be contiguous, of the expected shape, float32, or float64 where q is");
  return t.data_ptr();
}

AahParams common(Tensor& q, Tensor& k, Tensor& v, const Tensor& window, const MaybeTensor& sink_logits,
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
  p.window = int_vector(MaybeTensor(window), "window", p.q_heads);
  p.q_start = int_vector(q_start, "q_start", p.sequences);
  p.start = int_vector(start, "start", p.sequences);
  p.end = int_vector(end, "end", p.sequences);
  p.cu_q = int_vector(cu_q, "cu_q", p.sequences + 1);
  p.cu_k = int_vector(cu_k, "cu_k", p.sequences + 1);
  const int64_t most = AAH_UNLIMITED;
  STD_TORCH_CHECK(sinks >= 0 && limit >= 1, "aah: sinks must be at least 0 and limit at least 1");
  p.sinks = static_cast<int32_t>(sinks < most ? sinks : most);
  p.limit = static_cast<int32_t>(limit < most ? limit : most);
  p.scale = scale;
  p.softcap = softcap;
  if (sink_logits.has_value()) p.sink_logits = accumulator_data(*sink_logits, "sink_logits", q, {p.q_heads});
  return p;
}

// torch's own thread pool: a second one would fight it for the cores.
void run_on_torch(void*, int32_t workers, AahBody body, void* argument) {
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(argument, static_cast<int32_t>(i));
  });
}

AahThreads torch_threads() { return {nullptr, static_cast<int32_t>(torch::stable::get_num_threads()), run_on_torch}; }

void check_status(int status) { STD_TORCH_CHECK(status == AAH_OK, "aah: ", aah_status_text(status)); }

// `order` is the sorted work list of the CUDA kernels and max_q, max_k bound the lengths of packed documents, which
// a GPU could only learn by waiting; here the list is made in the call and lengths are read from cu_q, cu_k.
std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, Tensor window, MaybeTensor sink_logits, MaybeTensor q_start,
                               MaybeTensor cu_q, MaybeTensor cu_k, MaybeTensor start, MaybeTensor end, MaybeTensor,
                               int64_t, int64_t, int64_t sinks, int64_t limit, double scale, double softcap) {
  AahParams p = common(q, k, v, window, sink_logits, q_start, cu_q, cu_k, start, end, sinks, limit, scale, softcap);
  Tensor out = torch::stable::new_empty(q, {p.batch, p.q_len, p.q_heads, p.head_dim});
  Tensor lse = torch::stable::new_empty(q, {p.batch, p.q_heads, p.q_len}, accumulator(q));
  p.out = describe(out, "out", q);
  p.lse = lse.data_ptr();
  const AahThreads threads = torch_threads();
  check_status(aah_cpu_fwd(&p, &threads));
  return {out, lse};
}

// d_sink_logits is empty where there are no sink logits: an operator cannot return an optional tensor everywhere.
std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                                               Tensor lse, Tensor window, MaybeTensor sink_logits, MaybeTensor q_start,
                                               MaybeTensor cu_q, MaybeTensor cu_k, MaybeTensor start, MaybeTensor end,
                                               MaybeTensor, int64_t, int64_t, int64_t sinks, int64_t limit, double scale,
                                               double softcap) {
  AahParams p = common(q, k, v, window, sink_logits, q_start, cu_q, cu_k, start, end, sinks, limit, scale, softcap);
  make_rows(out);
  make_rows(dout);
  p.out = describe(out, "out", q);
  p.dout = describe(dout, "dout", q);
  check_shape(out, "out", p.batch, p.q_len, p.q_heads, p.head_dim);
  check_shape(dout, "dout", p.batch, p.q_len, p.q_heads, p.head_dim);
  const std::vector<int64_t> lse_shape = {p.batch, p.q_heads, p.q_len};
  lse = torch::stable::contiguous(lse);
  if (dlse.has_value()) dlse = torch::stable::contiguous(*dlse);
  p.lse = accumulator_data(lse, "lse", q, lse_shape);
  if (dlse.has_value()) p.dlse = accumulator_data(*dlse, "dlse", q, lse_shape);
  Tensor dq = torch::stable::new_empty(q, {p.batch, p.q_len, p.q_heads, p.head_dim});
  Tensor dk = torch::stable::new_empty(q, {p.batch, p.kv_len, p.kv_heads, p.head_dim});
  Tensor dv = torch::stable::new_empty(q, {p.batch, p.kv_len, p.kv_heads, p.head_dim});
  Tensor d_sink = torch::stable::new_empty(q, {sink_logits.has_value() ? p.q_heads : 0}, accumulator(q));
  p.dq = describe(dq, "dq", q);
  p.dk = describe(dk, "dk", q);
  p.dv = describe(dv, "dv", q);
  p.d_sink_logits = d_sink.data_ptr();
  const AahThreads threads = torch_threads();
  check_status(aah_cpu_bwd(&p, &threads));
  return {dq, dk, dv, d_sink};
}

// A cache is read and written in place: copying one that does not fit would cost more than attention.
AahTensor describe_cache(const Tensor& t, const char* name, const Tensor& k, const AahCacheParams& p) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == p.batch && t.size(2) == p.head_dim, "aah: ", name,
                  " must be [batch, slots, head_dim] = [", p.batch, ", slots, ", p.head_dim, "]");
  STD_TORCH_CHECK(t.size(1) == p.slots, "aah: ", name, " has ", t.size(1), " slots, expected ", p.slots);
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == k.scalar_type(), "aah: ", name,
                  " must be on the CPU and have the dtype of the new tokens");
  STD_TORCH_CHECK(t.numel() == 0 || t.stride(2) == 1, "aah: ", name, " must be contiguous in its last dimension");
  return {t.data_ptr(), t.stride(0), t.stride(1), 0};
}

AahCacheParams cache_params(Tensor& k, Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& offset,
                            const Tensor& first, int64_t past, int64_t sinks) {
  make_rows(k);
  make_rows(v);
  AahCacheParams p = {};
  p.version = AAH_CACHE_PARAMS_VERSION;
  p.dtype = dtype_of(k);
  p.k = describe(k, "k", k);
  p.v = describe(v, "v", k);
  p.batch = k.size(0);
  p.q_len = k.size(1);
  p.kv_heads = k.size(2);
  p.head_dim = k.size(3);
  check_shape(v, "v", p.batch, p.q_len, p.kv_heads, p.head_dim);
  STD_TORCH_CHECK(k_cache.dim() == 3, "aah: k_cache must have 3 dimensions [batch, slots, head_dim], not ", k_cache.dim());
  p.slots = k_cache.size(1);
  p.k_cache = describe_cache(k_cache, "k_cache", k, p);
  p.v_cache = describe_cache(v_cache, "v_cache", k, p);
  p.offset = int_vector(MaybeTensor(offset), "offset", p.kv_heads + 1);
  p.first = int_vector(MaybeTensor(first), "first", p.batch);
  p.past = past;
  STD_TORCH_CHECK(sinks >= 0, "aah: sinks must be at least 0");
  p.sinks = static_cast<int32_t>(sinks < AAH_UNLIMITED ? sinks : AAH_UNLIMITED);
  return p;
}

std::tuple<Tensor, Tensor> decode(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor offset,
                                  Tensor window, Tensor first, MaybeTensor sink_logits, int64_t past, int64_t sinks,
                                  int64_t limit, double scale, double softcap) {
  AahCacheParams p = cache_params(k, v, k_cache, v_cache, offset, first, past, sinks);
  make_rows(q);
  p.q = describe(q, "q", k);
  p.q_heads = q.size(2);
  check_shape(q, "q", p.batch, p.q_len, p.q_heads, p.head_dim);
  p.window = int_vector(MaybeTensor(window), "window", p.q_heads);
  STD_TORCH_CHECK(limit >= 1, "aah: limit must be at least 1");
  p.limit = static_cast<int32_t>(limit < AAH_UNLIMITED ? limit : AAH_UNLIMITED);
  p.scale = scale;
  p.softcap = softcap;
  if (sink_logits.has_value()) p.sink_logits = accumulator_data(*sink_logits, "sink_logits", q, {p.q_heads});
  Tensor out = torch::stable::new_empty(q, {p.batch, p.q_len, p.q_heads, p.head_dim});
  Tensor lse = torch::stable::new_empty(q, {p.batch, p.q_heads, p.q_len}, accumulator(q));
  p.out = describe(out, "out", q);
  p.lse = lse.data_ptr();
  const AahThreads threads = torch_threads();
  check_status(aah_cpu_decode(&p, &threads));
  return {out, lse};
}

void cache_append_(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor offset, Tensor first, int64_t past,
                   int64_t sinks) {
  const AahCacheParams p = cache_params(k, v, k_cache, v_cache, offset, first, past, sinks);
  for (const Tensor& t : {k_cache, v_cache}) {  // an expanded tensor would be written by two threads
    const bool apart = (t.size(1) < 2 || t.stride(1) >= t.size(2)) && (t.size(0) < 2 || t.stride(0) >= t.size(2));
    STD_TORCH_CHECK(t.numel() == 0 || apart, "aah: the rows of k_cache and v_cache must not overlap in memory");
  }
  const AahThreads threads = torch_threads();
  check_status(aah_cpu_cache_append(&p, &threads));
}

}  // namespace

#define AAH_COMMON_ARGUMENTS                                                                                  \
  "Tensor window, Tensor? sink_logits, Tensor? q_start, Tensor? cu_q, Tensor? cu_k, Tensor? start, "           \
  "Tensor? end, Tensor? order, SymInt max_q, SymInt max_k, int sinks, int limit, float scale, float softcap"

STABLE_TORCH_LIBRARY(aah, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, " AAH_COMMON_ARGUMENTS ") -> (Tensor, Tensor)");
  m.def("bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " AAH_COMMON_ARGUMENTS
        ") -> (Tensor, Tensor, Tensor, Tensor)");
  // No autograd: recording would cost more than a short call. ops/decode.py sends what needs gradients elsewhere.
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor offset, Tensor window, Tensor first, "
      "Tensor? sink_logits, SymInt past, int sinks, int limit, float scale, float softcap) -> (Tensor, Tensor)");
  m.def(
      "cache_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor offset, Tensor first, SymInt past, "
      "int sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(aah, CPU, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("bwd", TORCH_BOX(&bwd));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("cache_append_", TORCH_BOX(&cache_append_));
}
