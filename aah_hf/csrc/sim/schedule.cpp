// Prints the schedules that cuda/plan.h makes, by its cost model: makespan over ideal.
//
//   schedule [processors]
#include <cstdio>
#include <cstdlib>

#include "../cuda/plan.h"

int main(int argc, char** argv) {
  const int processors = argc > 1 ? std::atoi(argv[1]) : 132;
  std::printf("# windows 512, 1024, 2048, full in turn; batch 1, head size 128, 16-bit, %d processors\n", processors);
  std::printf("heads length entries split partials makespan ideal ratio unsplit_ratio\n");
  for (int heads : {8, 32}) {
    for (int64_t length : {1, 512, 1024, 2048, 4096, 8192, 16384}) {
      std::vector<int32_t> window;
      const int32_t mix[] = {512, 1024, 2048, INT32_MAX};
      for (int h = 0; h < heads; ++h) window.push_back(mix[h % 4]);
      aah::Problem p = {};
      p.shape = aah::shape_of(2, 128);
      p.batch = 1;
      p.q_len = length;
      p.kv_len = length == 1 ? 8192 : length;
      p.queries_last = true;
      p.q_heads = heads;
      p.window = window.data();
      p.limit = INT32_MAX;
      p.sinks = 4;
      p.processors = processors;
      const aah::Plan plan = aah::make_plan(p);
      const aah::Plan unsplit = aah::arrange(aah::items_of(p), 0, 1, processors);
      std::printf("%d %lld %zu %zu %lld %.1f %.1f %.3f %.3f\n", heads, static_cast<long long>(length), plan.entries.size(),
                  plan.merges.size(), static_cast<long long>(plan.partials), plan.makespan, plan.ideal,
                  plan.makespan / plan.ideal, unsplit.makespan / plan.ideal);
    }
  }
  return 0;
}
