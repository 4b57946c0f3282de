#include "launch_fwd.cuh"

cudaError_t aah::launch_forward_128(const Launch& launch) { return launch_forward_of_dtype<128>(launch); }
