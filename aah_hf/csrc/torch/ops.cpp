// Registers the operators of aah:: with PyTorch through its stable ABI: one library serves torch 2.10 and newer.
// The kernels behind it know nothing of torch; this file turns tensors into AahParams. ops_cuda.cpp adds GPUs.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"

namespace {

// torch's own thread pool: a second one would fight it for the cores.
void run_on_torch(void*, int32_t workers, AahBody body, void* argument) {
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(argument, static_cast<int32_t>(i));
  });
}

AahThreads torch_threads() { return {nullptr, static_cast<int32_t>(torch::stable::get_num_threads()), run_on_torch}; }

void check_status(int status) { STD_TORCH_CHECK(status == AAH_OK, "aah: ", aah_status_text(status)); }

// max_q and max_k bound the lengths of packed documents for a GPU's schedule; here cu_q and cu_k are read.
std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, Tensor window, MaybeTensor sink_logits, MaybeTensor q_start,
                               MaybeTensor cu_q, MaybeTensor cu_k, MaybeTensor start, MaybeTensor end, int64_t, int64_t,
                               int64_t sinks, int64_t limit, double scale, double softcap) {
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
                                               int64_t, int64_t, int64_t sinks, int64_t limit, double scale,
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
  p.offset = int_vector(MaybeTensor(offset), "offset", p.kv_heads + 1, offset.is_cpu());
  p.first = int_vector(MaybeTensor(first), "first", p.batch, first.is_cpu());
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
  p.window = int_vector(MaybeTensor(window), "window", p.q_heads, window.is_cpu());
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

// JSON: the instruction set in use, and what the library has for GPUs.
std::string info() {
  const std::string cuda = aah::cuda_info == nullptr ? "null" : aah::cuda_info();
  return std::string("{\"isa\": \"") + aah_cpu_isa() + "\", \"cuda\": " + cuda + "}";
}

}  // namespace

const char* (*aah::cuda_info)() = nullptr;

#define AAH_COMMON_ARGUMENTS                                                                                  \
  "Tensor window, Tensor? sink_logits, Tensor? q_start, Tensor? cu_q, Tensor? cu_k, Tensor? start, "           \
  "Tensor? end, SymInt max_q, SymInt max_k, int sinks, int limit, float scale, float softcap"

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
  m.def("info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(aah, CPU, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("bwd", TORCH_BOX(&bwd));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("cache_append_", TORCH_BOX(&cache_append_));
}

STABLE_TORCH_LIBRARY_IMPL(aah, CompositeExplicitAutograd, m) { m.impl("info", TORCH_BOX(&info)); }
