// What the drivers share: the chosen instruction set and memory. Defined in driver.cpp; host only.
#pragma once

#include <cstdlib>
#include <memory>

#include "schedule.h"

namespace aah {

const Kernels& kernels();

struct Free {
  void operator()(void* p) const { std::free(p); }
};
typedef std::unique_ptr<char, Free> Buffer;

// Cache-line aligned; empty on failure.
Buffer allocate(int64_t bytes);

// A thread keeps its scratch between calls: fresh pages would cost a page fault per 4 KiB in every call.
char* thread_scratch(int64_t bytes);

}  // namespace aah
