// The forward pass on the emulator, without the launcher: a schedule can be asked for. Compiled once per head size (AAH_DIM).
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "../cuda/call.h"
#include "run.h"

// Like aah_cuda_fwd, with pointers of the host. `processors`: multiprocessors to plan for; `most`: 0, or split whatever visits
// more tiles of keys than this; `*splits`: tiles of queries whose keys were split. What the emulator objects to goes to
// `error`, and the result is then -1.
extern "C" AAH_EXPORT int aah_sim_fwd(const AahParams* params, int64_t max_q, int64_t max_k, int processors, int most,
                                      uint64_t seed, int lazy, int* splits, char* error, int error_bytes) {
  using namespace aah;
  if (int status = check(*params)) return status;
  if (padded_dim(static_cast<int>(params->head_dim)) != AAH_DIM) return AAH_ERROR_SHAPE;
  *splits = 0;
  if (params->batch == 0 || params->q_len == 0) return AAH_OK;
  const Problem problem = problem_of(*params, max_q, max_k, processors);
  const int64_t rows = batch_rows(problem);
  const Plan plan = most > 0 ? arrange(items_of(problem), most, rows, processors) : make_plan(problem);
  *splits = static_cast<int>(plan.merges.size());
  const int tile = problem.shape.queries();
  const int64_t partials = plan.partials * rows * tile;
  std::vector<float> partial_out(partials * AAH_DIM, NAN), partial_lse(partials, NAN);
  ForwardArguments a = arguments_of(*params);
  a.window = params->window;
  a.entries = plan.entries.data();
  a.merges = plan.merges.data();
  a.rows = static_cast<int32_t>(rows);
  a.partials = static_cast<int32_t>(plan.partials);
  a.partial_out = partial_out.data();
  a.partial_lse = partial_lse.data();
  const sim::Options options = {seed, lazy != 0};
  std::string what = sim::run_forward(params->dtype, a, static_cast<int>(plan.entries.size()) * a.rows, options);
  if (what.empty() && !plan.merges.empty()) {
    what = sim::run_merge({a, params->dtype, tile, AAH_DIM}, static_cast<int>(plan.merges.size()) * a.rows, options);
  }
  std::snprintf(error, error_bytes, "%s", what.c_str());
  return what.empty() ? AAH_OK : -1;
}
