// Launching the forward kernels: one translation unit per head size, so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/arguments.h"

namespace aah {

struct Launch {
  ForwardArguments arguments;
  int dtype;  // AahDtype
  int device;
  int64_t blocks;  // entries or merges of the list, times batch rows
  cudaStream_t stream;
};

cudaError_t launch_forward_64(const Launch& launch);
cudaError_t launch_forward_80(const Launch& launch);
cudaError_t launch_forward_96(const Launch& launch);
cudaError_t launch_forward_128(const Launch& launch);
cudaError_t launch_forward_192(const Launch& launch);
cudaError_t launch_forward_256(const Launch& launch);
// tile_queries and width are the forward kernel's.
cudaError_t launch_merge(const Launch& launch, int tile_queries, int width);

}  // namespace aah
