// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
#if defined(__aarch64__)
#define AAH_ISA neon
#define AAH_ISA_NAME "neon"
#define AAH_ROWS 8  // 32 vector registers
#else
#define AAH_ISA baseline
#define AAH_ISA_NAME "baseline"
#define AAH_ROWS 4
#endif
#define AAH_VECTOR_BYTES 16
#include "attention_kernel.h"

extern "C" const aah::Kernels* aah_kernels_baseline(void) { return &aah::AAH_ISA::kKernels; }
