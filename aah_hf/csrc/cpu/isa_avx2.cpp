// Compiled with this instruction set switched on (see ops/build.py); called only where the processor has it.
#define AAH_ISA avx2
#define AAH_ISA_NAME "avx2"
#define AAH_ROWS 4
#define AAH_VECTOR_BYTES 32
#include "attention_kernel.h"

extern "C" const aah::Kernels* aah_kernels_avx2(void) { return &aah::AAH_ISA::kKernels; }
