// Fixed-width integers. NVRTC has no <stdint.h>, and device code is compiled by it too.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INT32_MAX 2147483647
#define INT32_MIN (-2147483647 - 1)
#else
#include <stdint.h>
#endif
