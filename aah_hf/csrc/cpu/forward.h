// The forward pass of one task. Part of attention_kernel.h.
#pragma once

#include "panel.h"

namespace aah {
namespace AAH_ISA {
namespace {

// One range of keys against one panel: scores, running softmax, output. Rows of k and v start at key range.begin.
template <typename C, int NV>
__attribute__((noinline)) void forward_range(Panel<C>& panel, const C* qt, C* ot, const C* k, const C* v, Range range,
                                             bool masked, C cap, int64_t dim, C* p) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const int32_t n = range.end - range.begin;
  V top[NV], base[NV], decay[NV], total[NV];
#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) top[x] = splat<C>(-infinity<C>());
  scores<C, NV>(k, dim, n, qt, dim, p, L, top);

  if (masked || cap != 0) {
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) top[x] = splat<C>(-infinity<C>());
    for (int32_t row = 0; row < n; ++row) {
      I seen[NV] = {};
      if (masked) lane_masks<C, NV>(panel, range.begin + row, seen);
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        V s = load<C>(p + row * L + x * W);
        if (cap != 0) s = tanh_vec(s) * cap;
        if (masked) s = seen[x] ? s : splat<C>(-infinity<C>());
        store<C>(p + row * L + x * W, s);
        top[x] = s > top[x] ? s : top[x];
      }
    }
  }

#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) {
    const V old = load<C>(panel.max + x * W);
    const V now = top[x] > old ? top[x] : old;
    // a lane that has seen nothing yet has maximum -inf: -inf - -inf is NaN, so subtract 0 there
    base[x] = now == splat<C>(-infinity<C>()) ? V{} : now;
    decay[x] = exp2_vec(old - base[x]);
    store<C>(panel.max + x * W, now);
    total[x] = V{};
  }
  for (int32_t row = 0; row < n; ++row) {
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) {
      const V e = exp2_vec(load<C>(p + row * L + x * W) - base[x]);
      store<C>(p + row * L + x * W, e);
      total[x] += e;
    }
  }
#pragma GCC unroll 3
  for (int x = 0; x < NV; ++x) store<C>(panel.sum + x * W, load<C>(panel.sum + x * W) * decay[x] + total[x]);

  constexpr int R = NV == 1 ? kTall : kRows;
  for (int64_t d = 0; d < dim; d += R) {
    const C* rows[R] = {v + d};
    V acc[R][NV];
    multiply<C, R, NV, false>(rows, dim, p, L, n, acc);
    // adding a tile's own sum, instead of carrying on with the running one, keeps rounding errors small
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        C* o = ot + (d + r) * L + x * W;
        store<C>(o, load<C>(o) * decay[x] + acc[r][x]);
      }
  }
}

template <typename C>
struct ForwardScratch {
  Panel<C>* panels;
  C *qt, *ot, *rows, *p, *k, *v;
  int64_t width;
  uintptr_t end;

  ForwardScratch(const AahParams& params, int32_t lanes, uintptr_t memory) {
    constexpr int W = Vec<C>::W, L = Vec<C>::L;
    Arena arena = {memory};
    const int64_t count = (lanes + L - 1) / L;
    width = round_up(params.head_dim, W);
    panels = arena.take<Panel<C>>(count);
    qt = arena.take<C>(count * width * L);
    ot = arena.take<C>(count * width * L);
    rows = arena.take<C>(W * width);
    p = arena.take<C>(kTile * L);
    k = arena.take<C>(kTile * params.head_dim);
    v = arena.take<C>(kTile * params.head_dim);
    end = arena.next;
  }
};

template <typename C>
void forward_task(const Call& call, const Task& t, char* memory) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const C log2e = static_cast<C>(1.4426950408889634), ln2 = static_cast<C>(0.6931471805599453);
  const AahParams& p = *call.params;
  const Sequence& s = call.sequences[t.sequence];
  const int32_t lanes = t.heads * (t.q_end - t.q_begin), count = (lanes + L - 1) / L;
  const int64_t dim = p.head_dim, bytes = element_bytes(p.dtype);
  const ForwardScratch<C> m(p, lanes, reinterpret_cast<uintptr_t>(memory));
  const int64_t panel_size = m.width * L;
  // Scores are kept in base 2, their scale folded into Q; a soft cap works on unscaled tanh arguments.
  const C cap = static_cast<C>(p.softcap) * log2e;
  const C factor = p.softcap != 0 ? static_cast<C>(p.scale / p.softcap) : static_cast<C>(p.scale) * log2e;
  const C* sink_logits = static_cast<const C*>(p.sink_logits);

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    panel_bounds<C>(p, s, t, i * L, lanes, panel);
    C *qt = m.qt + i * panel_size, *ot = m.ot + i * panel_size;
    for (int32_t v = 0; v < panel.vectors; ++v) {
      query_rows<C>(p, s, t, p.q, panel.first + v * W, panel.lanes - v * W, W, m.rows, m.width);
      transpose_in<C>(m.rows, m.width, qt + v * W, L, m.width, factor);
    }
    __builtin_memset(ot, 0, panel_size * sizeof(C));
    for (int32_t l = 0; l < L; ++l) {
      // a learned sink is a key without a value: it only starts the sum
      const bool sink = sink_logits && l < panel.lanes;
      panel.max[l] = sink ? sink_logits[head_of_lane(t, panel.first + l)] * log2e : -infinity<C>();
      panel.sum[l] = sink ? 1 : 0;
    }
  }

  for (int part = 0; part < 2; ++part) {
    const int32_t tile_begin = part ? t.band_tile : t.sink_tile, tile_end = part ? t.band_tile_end : t.sink_tile_end;
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      const int32_t low = tile * kTile, high = min_i(low + kTile, s.kv_len);
      const Range rows = visited_rows<C>(m.panels, count, low, high);
      if (rows.begin >= rows.end) continue;
      const C* k = key_rows<C>(p, p.k, s, t.kv_head, rows.begin, rows.end, m.k);
      const C* v = key_rows<C>(p, p.v, s, t.kv_head, rows.begin, rows.end, m.v);
      for (int32_t i = 0; i < count; ++i) {
        Range ranges[2];
        Panel<C>& panel = m.panels[i];
        const auto run = panel.vectors == 1   ? forward_range<C, 1>
                         : panel.vectors == 2 ? forward_range<C, 2>
                                              : forward_range<C, 3>;
        const int n = panel_ranges<C>(panel, low, high, ranges);
        for (int r = 0; r < n; ++r) {
          const int64_t skip = (ranges[r].begin - rows.begin) * dim;
          run(panel, m.qt + i * panel_size, m.ot + i * panel_size, k + skip, v + skip, ranges[r],
              needs_mask<C>(panel, ranges[r]), cap, dim, m.p);
        }
      }
    }
  }

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    for (int32_t v = 0; v < panel.vectors; ++v) {
      V inverse;
      for (int32_t x = 0; x < W; ++x) {
        const int32_t l = v * W + x;
        const bool empty = l >= panel.lanes || sees_nothing<C>(panel, l);
        inverse[x] = empty ? 0 : 1 / panel.sum[l];
        if (l >= panel.lanes) continue;
        const C top = panel.max[l], total = panel.sum[l];
        C lse;
        if (!empty) {
          lse = top * ln2 + static_cast<C>(sizeof(C) == 8 ? __builtin_log(total) : __builtin_logf(total));
        } else {
          lse = sink_logits ? sink_logits[head_of_lane(t, panel.first + l)] : -infinity<C>();
        }
        *lane_number<C>(p, s, t, p.lse, panel.first + l) = lse;
      }
      transpose_out<C>(m.ot + i * panel_size + v * W, L, m.rows, m.width, m.width, inverse);
      for (int32_t x = 0; x < min_i(W, panel.lanes - v * W); ++x) {
        const int32_t lane = panel.first + v * W + x;
        char* out = const_cast<char*>(
            row_of(p.out, s.q_batch, s.q_offset + query_of_lane(t, lane), head_of_lane(t, lane), bytes));
        if (sees_nothing<C>(panel, v * W + x)) {
          __builtin_memset(out, 0, dim * bytes);  // not 0 * garbage: another lane's key may hold NaN
        } else {
          store_row(p.dtype, m.rows + x * m.width, out, dim);
        }
      }
    }
  }
}

}  // namespace
}  // namespace AAH_ISA
}  // namespace aah
