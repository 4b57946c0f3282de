#include "../device/merge.cuh"
#include "../include/aah_params.h"
#include "launch_fwd.h"

namespace aah {

cudaError_t launch_merge(const Launch& launch, int tile_queries, int width) {
  const int groups = (tile_queries + kMergeRows - 1) / kMergeRows;
  const unsigned blocks = static_cast<unsigned>(launch.blocks * groups);
  const auto kernel = launch.dtype == AAH_F32    ? merge_kernel<float>
                      : launch.dtype == AAH_BF16 ? merge_kernel<BF16>
                                                 : merge_kernel<F16>;
  kernel<<<blocks, kMergeThreads, 0, launch.stream>>>(launch.arguments, tile_queries, width);
  return cudaGetLastError();
}

}  // namespace aah
