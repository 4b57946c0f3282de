// Launches one head size's kernels; included by its launch_fwd_*.cu only.
#pragma once

#include <atomic>

#include "../device/forward.cuh"
#include "../include/aah_params.h"
#include "launch_fwd.h"

namespace aah {

template <class T, int kDim>
cudaError_t launch_forward(const Launch& launch) {
  constexpr int kBytes = shared_bytes(sizeof(T), kDim);
  const auto kernel = forward_kernel<T, kDim>;
  // More than 48 KiB must be asked for, once per device.
  static std::atomic<uint64_t> asked{0};
  const uint64_t bit = launch.device < 64 ? uint64_t{1} << launch.device : 0;
  if (!(asked.load(std::memory_order_relaxed) & bit)) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    asked.fetch_or(bit, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(launch.blocks), shape_of(sizeof(T), kDim).threads(), kBytes, launch.stream>>>(
      launch.arguments);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t launch_forward_of_dtype(const Launch& launch) {
  if (launch.dtype == AAH_F32) return launch_forward<float, kDim>(launch);
  if (launch.dtype == AAH_BF16) return launch_forward<BF16, kDim>(launch);
  return launch_forward<F16, kDim>(launch);
}

}  // namespace aah
