// Tiles in shared memory: rows of global memory in, operands of matrix products out.
#pragma once

#include "arguments.h"
#include "ptx.cuh"

namespace aah {

AAH_DEVICE int lane_index() { return thread_index() % 32; }
AAH_DEVICE int warp_index() { return thread_index() / 32; }

// kRows rows of a tensor into a tile, asynchronously. `first` is the tile's first row in memory; rows for which real(row)
// is false, and columns from `dim` on, are filled with zeros without reading: they may be padding that holds NaN, and a
// probability of 0 times NaN would be NaN.
template <class T, int kDim, int kRows, int kThreads, class Real>
AAH_DEVICE void load_rows(char* tile, const Rows& tensor, const char* first, int32_t dim, Real real) {
  constexpr int kChunks = kDim * static_cast<int>(sizeof(T)) / 16, kStride = tile_stride(sizeof(T), kDim);
  // A thread keeps its column: kGroup threads beside each other read a row, or several where rows are short.
  constexpr int kGroup = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  constexpr int kStep = kThreads / kGroup;
  const int64_t stride = tensor.length * static_cast<int64_t>(sizeof(T));
  const int row = thread_index() / kGroup, chunk = thread_index() % kGroup;
  const char* from = first + row * stride + chunk * 16;
  char* to = tile + row * kStride + chunk * 16;
  AAH_UNROLL
  for (int i = 0; i < kRows; i += kStep) {
    if (kRows % kStep != 0 && row + i >= kRows) break;
    const bool read_row = real(row + i);
    AAH_UNROLL
    for (int c = 0; c < kChunks; c += kGroup) {
      const bool read = read_row && (c + chunk) * (16 / static_cast<int>(sizeof(T))) < dim;
      copy_async(to + i * kStride + c * 16, read ? from + c * 16 : tensor.data, read);
    }
    from += kStep * stride;
  }
}

// Two neighbouring numbers, rounded to T.
template <class T>
AAH_DEVICE void store_shared_pair(char* p, float x, float y) {
  store_shared(p, pack<T>(x, y));
}
template <>
AAH_DEVICE void store_shared_pair<float>(char* p, float x, float y) {
  store_shared(p, float_bits(x));
  store_shared(p + 4, float_bits(y));
}
template <class T>
AAH_DEVICE void store_pair(void* p, float x, float y) {
  *static_cast<uint32_t*>(p) = pack<T>(x, y);
}
template <>
AAH_DEVICE void store_pair<float>(void* p, float x, float y) {
  store_global_pair(p, x, y);
}

// Operands of one step of a matrix product: 16 numbers of the inner dimension, 8 for float, so always 32 bytes of a row.
template <class T>
struct Operands {
  struct A {
    uint32_t x[4];
  };
  struct B {
    uint32_t x[2];
  };
  static constexpr int kInner = 16;
  static AAH_DEVICE A a(const uint32_t (&r)[4]) { return {{r[0], r[1], r[2], r[3]}}; }
  static AAH_DEVICE B b(uint32_t r0, uint32_t r1) { return {{r0, r1}}; }
  static AAH_DEVICE void multiply(float (&c)[4], const A& a, const B& b) { mma<T>(c, a.x, b.x[0], b.x[1]); }
};

// float: a number is the sum of two of tf32 (11 + 11 bits of mantissa), and three products of four are summed, the small
// ones first; the fourth is below float's precision.
template <>
struct Operands<float> {
  struct A {
    uint32_t big[4], small[4];
  };
  struct B {
    uint32_t big[2], small[2];
  };
  static constexpr int kInner = 8;
  static AAH_DEVICE void split(uint32_t x, uint32_t* big, uint32_t* small) {
    *big = round_tf32(bits_float(x));
    *small = round_tf32(bits_float(x) - bits_float(*big));
  }
  static AAH_DEVICE A a(const uint32_t (&r)[4]) {
    A a;
    AAH_UNROLL
    for (int i = 0; i < 4; ++i) split(r[i], &a.big[i], &a.small[i]);
    return a;
  }
  static AAH_DEVICE B b(uint32_t r0, uint32_t r1) {
    B b;
    split(r0, &b.big[0], &b.small[0]);
    split(r1, &b.big[1], &b.small[1]);
    return b;
  }
  static AAH_DEVICE void multiply(float (&c)[4], const A& a, const B& b) {
    mma_tf32(c, a.small, b.big[0], b.big[1]);
    mma_tf32(c, a.big, b.small[0], b.small[1]);
    mma_tf32(c, a.big, b.big[0], b.big[1]);
  }
};

// s = Q K^T for the 16 kRowBlocks queries at `queries` and the kKeys keys at `keys` (tiles in shared memory).
template <class T, int kDim, int kRowBlocks, int kKeys>
AAH_DEVICE void multiply_queries_keys(float (&s)[kRowBlocks][kKeys / 8][4], const char* queries, const char* keys) {
  constexpr int kStride = tile_stride(sizeof(T), kDim);
  const int lane = lane_index();
  // matrices of A: (rows, chunk 0), (rows + 8, chunk 0), (rows, chunk 1), (rows + 8, chunk 1)
  const char* a_row = queries + lane % 16 * kStride + lane / 16 * 16;
  // matrices of two Bs: (keys, chunk 0), (keys, chunk 1), (keys + 8, chunk 0), (keys + 8, chunk 1)
  const char* b_row = keys + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 16;
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int n = 0; n < kKeys / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
  AAH_UNROLL
  for (int step = 0; step < kDim * static_cast<int>(sizeof(T)) / 32; ++step) {
    typename Operands<T>::A a[kRowBlocks];
    AAH_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      uint32_t r[4];
      load_matrices(r, a_row + m * 16 * kStride + step * 32);
      a[m] = Operands<T>::a(r);
    }
    AAH_UNROLL
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t r[4];
      load_matrices(r, b_row + n * 16 * kStride + step * 32);
      const typename Operands<T>::B low = Operands<T>::b(r[0], r[1]), high = Operands<T>::b(r[2], r[3]);
      AAH_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Operands<T>::multiply(s[m][2 * n], a[m], low);
        Operands<T>::multiply(s[m][2 * n + 1], a[m], high);
      }
    }
  }
}

// Probabilities as the A operand of the product with V: what a thread holds of a C fragment is what it must give.
template <class T>
AAH_DEVICE typename Operands<T>::A probability_operand(const float (*p)[4]) {
  // two C fragments of 8 keys side by side
  const uint32_t r[4] = {pack<T>(p[0][0], p[0][1]), pack<T>(p[0][2], p[0][3]), pack<T>(p[1][0], p[1][1]),
                         pack<T>(p[1][2], p[1][3])};
  return Operands<T>::a(r);
}
template <>
AAH_DEVICE typename Operands<float>::A probability_operand<float>(const float (*p)[4]) {
  // A wants columns t and t + 4, C has 2t and 2t + 1. A sum has no order, so key 2t is called t and 2t + 1 is t + 4; V's
  // rows are renamed alike.
  const uint32_t r[4] = {float_bits(p[0][0]), float_bits(p[0][2]), float_bits(p[0][1]), float_bits(p[0][3])};
  return Operands<float>::a(r);
}

// Two B operands of V, `keys` x 16 columns starting at row and column of `tile`.
template <class T, int kStride>
struct ValueOperands {
  const char* lane_row;
  // matrices: (keys, chunk 0), (keys + 8, chunk 0), (keys, chunk 1), (keys + 8, chunk 1)
  explicit AAH_DEVICE ValueOperands(const char* tile)
      : lane_row(tile + lane_index() % 16 * kStride + lane_index() / 16 * 16) {}
  AAH_DEVICE void load(int key, int column, typename Operands<T>::B (&b)[2]) const {
    uint32_t r[4];
    load_matrices_transposed(r, lane_row + key * kStride + column * static_cast<int>(sizeof(T)));
    b[0] = Operands<T>::b(r[0], r[1]);
    b[1] = Operands<T>::b(r[2], r[3]);
  }
};
template <int kStride>
struct ValueOperands<float, kStride> {
  const char* lane_row;
  explicit AAH_DEVICE ValueOperands(const char* tile)
      : lane_row(tile + lane_index() % 4 * 2 * kStride + lane_index() / 4 * 4) {}
  AAH_DEVICE void load(int key, int column, Operands<float>::B (&b)[2]) const {
    AAH_UNROLL
    for (int i = 0; i < 2; ++i) {
      const char* p = lane_row + key * kStride + (column + 8 * i) * 4;
      b[i] = Operands<float>::b(load_shared(p), load_shared(p + kStride));
    }
  }
};

// o += P V for the probabilities p that the warp holds and the values at `values` (a tile in shared memory).
template <class T, int kDim, int kRowBlocks, int kKeys>
AAH_DEVICE void multiply_probabilities_values(float (&o)[kRowBlocks][kDim / 8][4],
                                              const float (&p)[kRowBlocks][kKeys / 8][4], const char* values) {
  constexpr int kInner = Operands<T>::kInner;
  const ValueOperands<T, tile_stride(sizeof(T), kDim)> v(values);
  AAH_UNROLL
  for (int key = 0; key < kKeys; key += kInner) {
    typename Operands<T>::A a[kRowBlocks];
    AAH_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) a[m] = probability_operand<T>(&p[m][key / 8]);
    AAH_UNROLL
    for (int column = 0; column < kDim; column += 16) {
      typename Operands<T>::B b[2];
      v.load(key, column, b);
      AAH_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Operands<T>::multiply(o[m][column / 8], a[m], b[0]);
        Operands<T>::multiply(o[m][column / 8 + 1], a[m], b[1]);
      }
    }
  }
}

}  // namespace aah
