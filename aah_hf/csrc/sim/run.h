// Runs the kernels of one head size (AAH_DIM) on the emulator.
#pragma once

#include <string>

#include "../device/merge.cuh"
#include "../include/aah_params.h"
#include "machine.h"

namespace aah {
namespace sim {

template <class T>
std::string run_forward_of(const ForwardArguments& a, int blocks, const Options& options) {
  return launch(
      blocks, shape_of(sizeof(T), AAH_DIM).threads(), shared_bytes(sizeof(T), AAH_DIM), options,
      [](const void* x) { forward_kernel<T, AAH_DIM>(*static_cast<const ForwardArguments*>(x)); }, &a);
}

inline std::string run_forward(int dtype, const ForwardArguments& a, int blocks, const Options& options) {
  return dtype == AAH_F32    ? run_forward_of<float>(a, blocks, options)
         : dtype == AAH_BF16 ? run_forward_of<BF16>(a, blocks, options)
                             : run_forward_of<F16>(a, blocks, options);
}

struct Merge {
  ForwardArguments arguments;
  int dtype, tile_queries, width;
};

// `merges`: entries of the list of merges, times batch rows.
inline std::string run_merge(const Merge& merge, int merges, const Options& options) {
  const int groups = (merge.tile_queries + kMergeRows - 1) / kMergeRows;
  return launch(
      merges * groups, kMergeThreads, 0, options,
      [](const void* x) {
        const Merge& m = *static_cast<const Merge*>(x);
        if (m.dtype == AAH_F32) return merge_kernel<float>(m.arguments, m.tile_queries, m.width);
        if (m.dtype == AAH_BF16) return merge_kernel<BF16>(m.arguments, m.tile_queries, m.width);
        return merge_kernel<F16>(m.arguments, m.tile_queries, m.width);
      },
      &merge);
}

}  // namespace sim
}  // namespace aah
