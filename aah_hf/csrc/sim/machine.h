// A host that runs kernels as a GPU does: blocks of threads, warps, shared memory, barriers, asynchronous copies. Tests only.
//
// A thread is a fiber. It runs until it meets the other lanes of its warp or the other threads of its block; which
// warp runs next, in what order its lanes run and when asynchronous copies land depend on a seed. What goes wrong in any
// schedule is an error with the kernel's line:
//   - lanes of a warp, or threads of a block, that meet at different places, or not at all;
//   - accesses to shared memory by two threads without a barrier between (a race, in whatever order they happened to run);
//   - touching shared memory that an asynchronous copy has yet to fill, or that lies outside what was asked for.
// Shared memory starts as NaN. Blind to bank conflicts, fences and everything about time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace aah {
namespace sim {

struct Options {
  uint64_t seed;  // 0: lockstep
  bool lazy;      // copies land when they are waited for, and until then their target is NaN; else at once
};

// Runs body(argument) for each of blocks x threads threads. Empty, or what went wrong.
std::string launch(int blocks, int threads, size_t shared_bytes, const Options& options, void (*body)(const void*),
                   const void* argument);

// --- what ptx_twin.h builds on; all of the running thread -----------------------------------------------------------

int thread_index();
int block_index();
char* shared_memory();

enum Meeting { kBarrier, kWarpSync, kShuffle, kAny, kLoadMatrices, kLoadMatricesTransposed, kMmaF16, kMmaBF16, kMmaTF32 };

// All threads of the block, or all lanes of the warp, meet here. For a warp, `act` then runs once on the arguments of all
// 32 lanes.
void meet_block(int line);
void meet_warp(Meeting what, int line, void* arguments, void (*act)(void* const* of_lane));

// `bytes` (a multiple of 4) of shared memory are about to be read or written by this thread.
void reads(const void* shared, int bytes, int line);
void writes(const void* shared, int bytes, int line);

void start_copy(void* shared, const void* global, bool real, int line);
void commit_copies();
void wait_copies(int groups_left, int line);

}  // namespace sim
}  // namespace aah
