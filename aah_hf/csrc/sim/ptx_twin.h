// device/ptx.cuh for the host: the same functions, after the tables of the PTX manual ("Matrix fragments for mma.m16n8k16
// / m16n8k8", "ldmatrix", "cp.async", "cvt"). Included by ptx.cuh.
#pragma once

#include <math.h>
#include <string.h>

#include "machine.h"

#define AAH_DEVICE inline
#define AAH_KERNEL
#define AAH_UNROLL
#define __launch_bounds__(...)
#define __grid_constant__

namespace aah {

inline int thread_index() { return sim::thread_index(); }
inline int block_index() { return sim::block_index(); }
inline char* shared_memory() { return sim::shared_memory(); }

// --- threads with each other ---------------------------------------------------------------------------------------

inline void sync_block(int line = __builtin_LINE()) { sim::meet_block(line); }
inline void sync_warp(int line = __builtin_LINE()) {
  sim::meet_warp(sim::kWarpSync, line, nullptr, [](void* const*) {});
}
inline float shuffle_xor(float x, int mask, int line = __builtin_LINE()) {
  struct Call {
    float in, out;
    int mask;
  } call = {x, 0, mask};
  sim::meet_warp(sim::kShuffle, line, &call, [](void* const* of) {
    for (int i = 0; i < 32; ++i) {
      Call& c = *static_cast<Call*>(of[i]);
      c.out = static_cast<Call*>(of[(i ^ c.mask) & 31])->in;
    }
  });
  return call.out;
}
inline bool any(bool x, int line = __builtin_LINE()) {
  bool flag = x;
  sim::meet_warp(sim::kAny, line, &flag, [](void* const* of) {
    bool some = false;
    for (int i = 0; i < 32; ++i) some = some || *static_cast<bool*>(of[i]);
    for (int i = 0; i < 32; ++i) *static_cast<bool*>(of[i]) = some;
  });
  return flag;
}

// --- memory --------------------------------------------------------------------------------------------------------

inline void copy_async(void* shared, const void* global, bool real, int line = __builtin_LINE()) {
  sim::start_copy(shared, global, real, line);
}
inline void copy_async_commit() { sim::commit_copies(); }
template <int kGroups>
inline void copy_async_wait(int line = __builtin_LINE()) {
  sim::wait_copies(kGroups, line);
}

// ldmatrix .x4: thread 8 i + j has the address of row j of matrix i. Register i of thread T gets, of matrix i, row T / 4,
// elements 2 (T % 4) and 2 (T % 4) + 1; with .trans the elements of the transposed matrix.
struct LoadMatrices {
  const char* row;
  uint32_t r[4];
};
template <bool kTransposed>
inline void load_matrices_of_warp(void* const* of) {
  for (int thread = 0; thread < 32; ++thread) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t element[2];
      for (int i = 0; i < 2; ++i) {
        int row = thread / 4, column = thread % 4 * 2 + i;
        if (kTransposed) {
          const int swap = row;
          row = column;
          column = swap;
        }
        memcpy(&element[i], static_cast<LoadMatrices*>(of[8 * matrix + row])->row + 2 * column, 2);
      }
      static_cast<LoadMatrices*>(of[thread])->r[matrix] = element[0] | static_cast<uint32_t>(element[1]) << 16;
    }
  }
}
inline void load_matrices(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  LoadMatrices call = {static_cast<const char*>(row), {}};
  sim::reads(row, 16, line);
  sim::meet_warp(sim::kLoadMatrices, line, &call, load_matrices_of_warp<false>);
  memcpy(r, call.r, sizeof(r));
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  LoadMatrices call = {static_cast<const char*>(row), {}};
  sim::reads(row, 16, line);
  sim::meet_warp(sim::kLoadMatricesTransposed, line, &call, load_matrices_of_warp<true>);
  memcpy(r, call.r, sizeof(r));
}

struct Chunk {
  uint32_t x[4];
};
inline uint32_t load_shared(const void* p, int line = __builtin_LINE()) {
  sim::reads(p, 4, line);
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}
inline void store_shared(void* p, uint32_t x, int line = __builtin_LINE()) {
  sim::writes(p, 4, line);
  memcpy(p, &x, 4);
}
inline Chunk load_shared_chunk(const void* p, int line = __builtin_LINE()) {
  sim::reads(p, 16, line);
  Chunk c;
  memcpy(&c, p, 16);
  return c;
}
inline void store_global_chunk(void* p, Chunk c) { memcpy(p, &c, 16); }
inline void store_global_pair(void* p, float x, float y) {
  memcpy(p, &x, 4);
  memcpy(static_cast<char*>(p) + 4, &y, 4);
}

// --- arithmetic ----------------------------------------------------------------------------------------------------

inline float bits_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

inline float exp2_fast(float x) { return exp2f(x); }

// Round to nearest even, keeping `bits` bits of the float's 23 bits of mantissa (normal numbers).
inline uint32_t keep_mantissa(uint32_t u, int bits) {
  const int drop = 23 - bits;
  u += (1u << (drop - 1)) - 1 + (u >> drop & 1);
  return u >> drop << drop;
}
inline uint16_t half_bits(float x) {
  const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000;
  if (isnan(x)) return 0x7fff;
  const float size = fabsf(x);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(nearbyintf(size * 0x1p24f)));
  const uint32_t rounded = keep_mantissa(float_bits(size), 10);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}
inline float half_float(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24f;
  return sign * bits_float(static_cast<uint32_t>(exponent + 112) << 23 | static_cast<uint32_t>(mantissa) << 13);
}
// Conversion would be most of the emulator's time.
inline const float* half_float_table() {
  static const struct Table {
    float value[65536];
    Table() {
      for (int i = 0; i < 65536; ++i) value[i] = half_float(static_cast<uint16_t>(i));
    }
  } table;
  return table.value;
}
inline uint16_t bfloat_bits(float x) {
  return isnan(x) ? 0x7fff : static_cast<uint16_t>((isinf(x) ? float_bits(x) : keep_mantissa(float_bits(x), 7)) >> 16);
}
inline float bfloat_float(uint16_t b) { return bits_float(static_cast<uint32_t>(b) << 16); }

// cvt.rn.*x2.f32 d, a, b: a becomes the upper half, b the lower.
template <class T>
inline uint32_t pack(float low, float high);
template <>
inline uint32_t pack<F16>(float low, float high) {
  return half_bits(low) | static_cast<uint32_t>(half_bits(high)) << 16;
}
template <>
inline uint32_t pack<BF16>(float low, float high) {
  return bfloat_bits(low) | static_cast<uint32_t>(bfloat_bits(high)) << 16;
}
// .rna: nearest, ties away from zero
inline uint32_t round_tf32(float x) {
  if (isnan(x) || isinf(x)) return float_bits(x);
  return (float_bits(x) + 0x1000u) & ~0x1fffu;
}

// mma.m16n8k16 (16-bit types): with g = lane / 4 and t = lane % 4,
//   A: elements a0 ... a7 in 4 registers; row = g for a0, a1, a4, a5, else g + 8; column = 2t + (i & 1), + 8 for i >= 4
//   B: elements b0 ... b3 in 2 registers; row = 2t + (i & 1), + 8 for i >= 2; column = g
//   C: c0 ... c3; row = g for i < 2, else g + 8; column = 2t + (i & 1)
// mma.m16n8k8 (tf32):
//   A: a0 ... a3; row = g for a0, a2, else g + 8; column = t, + 4 for a2, a3
//   B: b0, b1; row = t, + 4 for b1; column = g
// Products are exact and their sum is rounded to float once; a GPU sums in another order and truncates.
struct Mma {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
template <class Value>
inline void mma_16_of_warp(void* const* of, Value value) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& m = *static_cast<Mma*>(of[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i == 0 || i == 1 || i == 4 || i == 5 ? g : g + 8;
      a[row][t * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = value(static_cast<uint16_t>(m.a[i / 2] >> (16 * (i & 1))));
    }
    for (int i = 0; i < 4; ++i) {
      b[t * 2 + (i & 1) + (i >= 2 ? 8 : 0)][g] = value(static_cast<uint16_t>(m.b[i / 2] >> (16 * (i & 1))));
    }
  }
  double product[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) {
        product[row][column] += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Mma*>(of[lane])->c;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(c[i] + product[i < 2 ? g : g + 8][t * 2 + (i & 1)]);
  }
}
template <class T>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE());
template <>
inline void mma<F16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
  Mma call = {c, a, {b0, b1}};
  sim::meet_warp(sim::kMmaF16, line, &call,
                 [](void* const* of) { mma_16_of_warp(of, [](uint16_t x) { return half_float_table()[x]; }); });
}
template <>
inline void mma<BF16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
  Mma call = {c, a, {b0, b1}};
  sim::meet_warp(sim::kMmaBF16, line, &call,
                 [](void* const* of) { mma_16_of_warp(of, [](uint16_t x) { return bfloat_float(x); }); });
}
inline void mma_tf32_of_warp(void* const* of) {
  float a[16][8], b[8][8];
  const auto value = [](uint32_t x) { return bits_float(x & ~0x1fffu); };  // the lower bits are ignored
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& m = *static_cast<Mma*>(of[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[i == 0 || i == 2 ? g : g + 8][i >= 2 ? t + 4 : t] = value(m.a[i]);
    for (int i = 0; i < 2; ++i) b[i == 0 ? t : t + 4][g] = value(m.b[i]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Mma*>(of[lane])->c;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      double sum = c[i];
      for (int k = 0; k < 8; ++k) {
        sum += static_cast<double>(a[i < 2 ? g : g + 8][k]) * static_cast<double>(b[k][t * 2 + (i & 1)]);
      }
      c[i] = static_cast<float>(sum);
    }
  }
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  Mma call = {c, a, {b0, b1}};
  sim::meet_warp(sim::kMmaTF32, line, &call, mma_tf32_of_warp);
}

}  // namespace aah
