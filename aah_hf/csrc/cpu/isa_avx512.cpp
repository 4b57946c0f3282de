// Compiled with this instruction set switched on (see ops/build.py); called only where the processor has it.
#define AAH_ISA avx512
#define AAH_ISA_NAME "avx512"
#define AAH_ROWS 8
#define AAH_VECTOR_BYTES 64
#include "attention_kernel.h"

extern "C" const aah::Kernels* aah_kernels_avx512(void) { return &aah::AAH_ISA::kKernels; }
