// The forward pass on the emulator: like cuda/launch_fwd.cu, with memory of the host. Compiled once per head size (AAH_DIM).
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../cuda/call.h"
#include "../device/merge.cuh"
#include "machine.h"

namespace {

using namespace aah;

struct Merge {
  ForwardArguments arguments;
  int tile_queries, width;
};

template <class T>
std::string run(const ForwardArguments& a, const Plan& plan, int tile_queries, const sim::Options& options) {
  std::string error = sim::launch(
      static_cast<int>(plan.entries.size()) * a.rows, shape_of(sizeof(T), AAH_DIM).threads(), shared_bytes(sizeof(T), AAH_DIM),
      options, [](const void* x) { forward_kernel<T, AAH_DIM>(*static_cast<const ForwardArguments*>(x)); }, &a);
  if (!error.empty() || plan.merges.empty()) return error;
  const Merge merge = {a, tile_queries, AAH_DIM};
  const int groups = (tile_queries + kMergeRows - 1) / kMergeRows;
  return sim::launch(
      static_cast<int>(plan.merges.size()) * a.rows * groups, kMergeThreads, 0, options,
      [](const void* x) {
        const Merge& m = *static_cast<const Merge*>(x);
        merge_kernel<T>(m.arguments, m.tile_queries, m.width);
      },
      &merge);
}

}  // namespace

// Like aah_cuda_fwd, with pointers of the host. `processors`: multiprocessors to plan for; `most`: 0, or split whatever visits
// more tiles of keys than this; `*splits`: tiles of queries whose keys were split. What the emulator objects to goes to
// `error`, and the result is then -1.
extern "C" AAH_EXPORT int aah_sim_fwd(const AahParams* params, int64_t max_q, int64_t max_k, int processors, int most,
                                      uint64_t seed, int lazy, int* splits, char* error, int error_bytes) {
  if (int status = check(*params)) return status;
  if (padded_dim(static_cast<int>(params->head_dim)) != AAH_DIM) return AAH_ERROR_SHAPE;
  *splits = 0;
  if (params->batch == 0 || params->q_len == 0) return AAH_OK;
  const Problem problem = problem_of(*params, max_q, max_k, processors);
  const Plan plan = most > 0 ? arrange(items_of(problem), most, batch_rows(problem), processors) : make_plan(problem);
  *splits = static_cast<int>(plan.merges.size());
  const int tile = problem.shape.queries();
  const int64_t partials = plan.partials * batch_rows(problem) * tile;
  std::vector<float> partial_out(partials * AAH_DIM), partial_lse(partials);
  for (std::vector<float>* v : {&partial_out, &partial_lse}) std::memset(v->data(), 0xff, v->size() * 4);
  ForwardArguments a = arguments_of(*params);
  a.window = params->window;
  a.entries = plan.entries.data();
  a.merges = plan.merges.data();
  a.rows = static_cast<int32_t>(batch_rows(problem));
  a.partials = static_cast<int32_t>(plan.partials);
  a.partial_out = partial_out.data();
  a.partial_lse = partial_lse.data();
  const sim::Options options = {seed, lazy != 0};
  const std::string what = params->dtype == AAH_F32    ? run<float>(a, plan, tile, options)
                           : params->dtype == AAH_BF16 ? run<BF16>(a, plan, tile, options)
                                                       : run<F16>(a, plan, tile, options);
  std::snprintf(error, error_bytes, "%s", what.c_str());
  return what.empty() ? AAH_OK : -1;
}
