// Everything that a kernel asks of the hardware: all inline PTX is here. csrc/sim/ptx_twin.h has the same functions for
// the host, written from the PTX manual's tables and not from how the kernels use them; with AAH_SIM it takes their place.
//
// Fragments: lane = 4 g + t. mma C is 16 x 8: c[0], c[1] = (row g, columns 2t, 2t + 1), c[2], c[3] = row g + 8.
#pragma once

#include "../include/aah_int.h"

namespace aah {
// Element types. Their bits are only ever moved, multiplied by mma, and made by pack().
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
}  // namespace aah

#if defined(AAH_SIM)
#include "../sim/ptx_twin.h"
#else

#define AAH_DEVICE __device__ __forceinline__
#define AAH_UNROLL _Pragma("unroll")
#define AAH_KERNEL __global__

namespace aah {

AAH_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
AAH_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }

AAH_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// --- threads with each other ---------------------------------------------------------------------------------------

AAH_DEVICE void sync_block() { __syncthreads(); }
AAH_DEVICE void sync_warp() { __syncwarp(); }
AAH_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
AAH_DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x); }

// --- memory --------------------------------------------------------------------------------------------------------

AAH_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, without registers; zeros where not `real`, and then `global` is not read.
AAH_DEVICE void copy_async(void* shared, const void* global, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(real ? 16 : 0)
               : "memory");
}
AAH_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups of this thread's groups are under way; other threads see the data after a barrier.
template <int kGroups>
AAH_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers (or 8 x 4 of 32-bit numbers) whose rows of 16 bytes start at the lanes' addresses,
// matrix i at those of lanes 8 i ... 8 i + 7. r[i]: row g, the 32 bits at column t.
AAH_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of 16-bit numbers, transposed: r[i] has rows 2t (low half) and 2t + 1 of column g.
AAH_DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

struct Chunk {
  uint32_t x[4];
};
AAH_DEVICE uint32_t load_shared(const void* p) { return *static_cast<const uint32_t*>(p); }
AAH_DEVICE void store_shared(void* p, uint32_t x) { *static_cast<uint32_t*>(p) = x; }
AAH_DEVICE Chunk load_shared_chunk(const void* p) {
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
AAH_DEVICE void store_global_chunk(void* p, Chunk c) {
  *static_cast<uint4*>(p) = make_uint4(c.x[0], c.x[1], c.x[2], c.x[3]);
}
AAH_DEVICE void store_global_pair(void* p, float x, float y) { *static_cast<float2*>(p) = make_float2(x, y); }

// --- arithmetic ----------------------------------------------------------------------------------------------------

AAH_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
AAH_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }

// 2^x with a relative error of 2^-22; 0 for -inf.
AAH_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers in one register, the first in the low half, rounded to nearest even.
template <class T>
AAH_DEVICE uint32_t pack(float low, float high);
template <>
AAH_DEVICE uint32_t pack<F16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
AAH_DEVICE uint32_t pack<BF16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The nearest tf32 number (10 bits of mantissa), as the bits of a float.
AAH_DEVICE uint32_t round_tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// c += A B for A 16 x 16 by rows, B 16 x 8: a[0], a[1] = rows g, g + 8 at columns 2t, 2t + 1, a[2], a[3] at columns
// 8 + 2t, 9 + 2t; b0 = rows 2t, 2t + 1 of column g, b1 = rows 8 + 2t, 9 + 2t.
template <class T>
AAH_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
AAH_DEVICE void mma<F16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
AAH_DEVICE void mma<BF16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// tf32: A 16 x 8, B 8 x 8: a[0], a[1] = rows g, g + 8 at column t, a[2], a[3] at column t + 4; b0, b1 = rows t, t + 4 of
// column g. Bits of numbers below tf32's precision are ignored.
AAH_DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace aah
#endif  // AAH_SIM
