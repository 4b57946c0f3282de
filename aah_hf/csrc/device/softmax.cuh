// Scores in registers: scale, soft cap, mask, and the online softmax. A thread holds rows g and g + 8 of every row block.
#pragma once

#include "ptx.cuh"
#include "sequence.cuh"

namespace aah {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

AAH_DEVICE float minus_infinity() { return bits_float(0xff800000u); }

// tanh with an absolute error of 2e-7 and a relative one of 1e-6: 1 - 2 / (1 + e^2x) cancels near 0, so a polynomial there.
AAH_DEVICE float tanh_score(float x) {
  const float y = x * x;
  const float small = x + x * y * (-0.333333333f + y * (0.133333333f + y * (-0.053968254f + y * 0.021869489f)));
  const float large = 1 - 2 / (1 + exp2_fast(x * (2 * kLog2e)));
  return y < 0.09f ? small : large;
}

// Running maximum (base 2, scaled) and this thread's share of the running sum, per row.
template <int kRowBlocks>
struct Softmax {
  float top[kRowBlocks][2], sum[kRowBlocks][2];
};

// Scores to base 2 where exp2(factor * s) will not do: a soft cap, or a factor that is not positive (the largest product is
// not the largest score then, and -inf * 0 is NaN). Afterwards the factor is 1.
template <int kRowBlocks, int kFragments>
AAH_DEVICE void transform_scores(float (&s)[kRowBlocks][kFragments][4], float factor, float softcap) {
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      AAH_UNROLL
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] *= factor;
        if (softcap != 0) s[m][n][i] = softcap * tanh_score(s[m][n][i]);
      }
    }
  }
}

// What the mask needs to know of a tile's queries.
struct Rule {
  int32_t window, sinks, limit, start, stop, kv_len;
  AAH_DEVICE AahSpan span(int32_t position) const {
    return aah_visible(position, window, sinks, limit, start, stop, kv_len);
  }
};

// -inf to scores of keys first_key, ... that their query does not see; `position` is that of the warp's first query.
template <int kRowBlocks, int kFragments>
AAH_DEVICE void mask_scores(float (&s)[kRowBlocks][kFragments][4], const Rule& rule, int32_t position, int32_t first_key) {
  const int lane = thread_index() % 32;
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const AahSpan span = rule.span(position + m * 16 + half * 8 + lane / 4);
      AAH_UNROLL
      for (int n = 0; n < kFragments; ++n) {
        AAH_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (!aah_sees(span, first_key + n * 8 + lane % 4 * 2 + i)) s[m][n][2 * half + i] = minus_infinity();
        }
      }
    }
  }
}

// Sum or maximum over the four lanes that share a row.
AAH_DEVICE float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
AAH_DEVICE float row_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// Scores to probabilities relative to the running maximum; sums and output are rescaled where that has grown.
template <int kRowBlocks, int kFragments, int kOutFragments>
AAH_DEVICE void update_softmax(float (&s)[kRowBlocks][kFragments][4], float factor, Softmax<kRowBlocks>& softmax,
                               float (&o)[kRowBlocks][kOutFragments][4]) {
  float decay[kRowBlocks][2];
  bool grown = false;
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int half = 0; half < 2; ++half) {
      float top = minus_infinity();
      AAH_UNROLL
      for (int n = 0; n < kFragments; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      const float old = softmax.top[m][half], now = fmaxf(old, row_max(top) * factor);
      // a row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: subtract 0 there
      const float base = now == minus_infinity() ? 0 : now;
      float sum = 0;
      AAH_UNROLL
      for (int n = 0; n < kFragments; ++n) {
        AAH_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = s[m][n][2 * half + i];
          x = exp2_fast(x * factor - base);
          sum += x;
        }
      }
      decay[m][half] = exp2_fast(old - base);
      grown = grown || now != old;
      softmax.top[m][half] = now;
      softmax.sum[m][half] = softmax.sum[m][half] * decay[m][half] + sum;
    }
  }
  if (!any(grown)) return;  // the usual case after a few tiles
  AAH_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    AAH_UNROLL
    for (int n = 0; n < kOutFragments; ++n) {
      AAH_UNROLL
      for (int i = 0; i < 4; ++i) o[m][n][i] *= decay[m][i / 2];
    }
  }
}

}  // namespace aah
