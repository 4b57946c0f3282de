// Registers aah::fwd and aah::bwd with PyTorch through its stable ABI: one library serves torch 2.10 and newer.
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
  m.def("info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(aah, CPU, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("bwd", TORCH_BOX(&bwd));
}

STABLE_TORCH_LIBRARY_IMPL(aah, CompositeExplicitAutograd, m) { m.impl("info", TORCH_BOX(&info)); }
