// The backward pass of one task. Part of attention_kernel.h.
#pragma once

#include "panel.h"

namespace aah {
namespace AAH_ISA {
namespace {

// One range of keys against one panel: probabilities and gradients of the scores, both [row * ld + lane], and the
// range's share of dQ^T. d(out) is scaled beforehand, so gradients of the scores carry `scale` already.
template <typename C, int NV>
__attribute__((noinline)) void backward_range(const Panel<C>& panel, const C* qt, const C* dot, C* dqt, const C* k,
                                              const C* v, Range range, bool masked, C cap, int64_t dim, C* p, C* ds,
                                              int64_t ld) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const int32_t n = range.end - range.begin;
  V unused[NV] = {};
  scores<C, NV>(k, dim, n, qt, dim, p, ld, unused);

  for (int32_t row = 0; row < n; ++row) {
    I seen[NV] = {};
    if (masked) lane_masks<C, NV>(panel, range.begin + row, seen);
#pragma GCC unroll 3
    for (int x = 0; x < NV; ++x) {
      V s = load<C>(p + row * ld + x * W);
      if (cap != 0) {
        const V t = tanh_vec(s);
        store<C>(ds + row * ld + x * W, static_cast<C>(1) - t * t);  // the soft cap's derivative waits where dS will be
        s = t * cap;
      }
      V e = exp2_vec(s - load<C>(panel.max + x * W));
      if (masked) e = seen[x] ? e : V{};
      store<C>(p + row * ld + x * W, e);
    }
  }

  constexpr int R = NV == 1 ? kTall : kRows;
  for (int32_t row = 0; row < n; row += R) {
    const C* rows[R];
    V acc[R][NV];
    block_rows<C, R>(v, dim, row, n, rows);
    multiply<C, R, NV, true>(rows, 0, dot, L, dim, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (row + r < n) {
#pragma GCC unroll 3
        for (int x = 0; x < NV; ++x) {
          const int64_t at = (row + r) * ld + x * W;
          V g = load<C>(p + at) * (acc[r][x] - load<C>(panel.sum + x * W));
          if (cap != 0) g = g * load<C>(ds + at);
          store<C>(ds + at, g);
        }
      }
    }
  }

  for (int64_t d = 0; d < dim; d += R) {
    const C* rows[R] = {k + d};
    V acc[R][NV];
    multiply<C, R, NV, false>(rows, dim, ds, ld, n, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int x = 0; x < NV; ++x) {
        C* o = dqt + (d + r) * L + x * W;
        store<C>(o, load<C>(o) + acc[r][x]);
      }
  }
}

// out[row, d] = sum over lanes of weight[row * ldw + lane] * x[lane * width + d], rows of one block, NV vectors of d.
template <typename C, int NV>
AAH_INLINE void weighted_rows(const C* weight, int64_t ldw, int32_t row, int32_t n, const C* x, int64_t width,
                              int64_t lanes, C* out) {
  constexpr int W = Vec<C>::W;
  const C* rows[kRows];
  typename Vec<C>::V acc[kRows][NV];
  block_rows<C, kRows>(weight, ldw, row, n, rows);
  multiply<C, kRows, NV, true>(rows, 0, x, width, lanes, acc);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (row + r < n) {
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) store<C>(out + (row + r) * width + v * W, acc[r][v]);
    }
  }
}

// The same over all of head_dim; block b of rows sums over the lanes touched[b] only.
template <typename C>
__attribute__((noinline)) void weighted_sum(const C* weight, int64_t ldw, int32_t n, const Range* touched, const C* x,
                                            int64_t width, C* out) {
  constexpr int W = Vec<C>::W;
  const int64_t vectors = width / W;
  int64_t step;
  for (int64_t d = 0; d < vectors; d += step) {
    const int64_t left = vectors - d;
    step = left == 4 ? 2 : left < kWide ? left : kWide;
    for (int32_t row = 0; row < n; row += kRows) {
      const Range lanes = touched[row / kRows];
      const C *w = weight + lanes.begin, *from = x + lanes.begin * width + d * W;
      const int64_t depth = lanes.end - lanes.begin;
      if (step == 3) weighted_rows<C, 3>(w, ldw, row, n, from, width, depth, out + d * W);
      if (step == 2) weighted_rows<C, 2>(w, ldw, row, n, from, width, depth, out + d * W);
      if (step == 1) weighted_rows<C, 1>(w, ldw, row, n, from, width, depth, out + d * W);
    }
  }
}

template <typename C>
struct BackwardScratch {
  Panel<C>* panels;
  C *qt, *dot, *dqt, *q, *dout, *p, *ds, *k, *v, *dk, *dv;
  int64_t width, ld;
  uintptr_t end;

  BackwardScratch(const AahParams& params, int32_t lanes, uintptr_t memory) {
    constexpr int W = Vec<C>::W, L = Vec<C>::L;
    Arena arena = {memory};
    const int64_t count = (lanes + L - 1) / L;
    width = round_up(params.head_dim, W);
    // an odd number of cache lines: the rows of a block of P then lie in different cache sets
    ld = round_up(count * L, 64 / sizeof(C)) | (64 / static_cast<int64_t>(sizeof(C)));
    panels = arena.take<Panel<C>>(count);
    qt = arena.take<C>(count * width * L);
    dot = arena.take<C>(count * width * L);
    dqt = arena.take<C>(count * width * L);
    q = arena.take<C>(count * L * width);
    dout = arena.take<C>(count * L * width);
    p = arena.take<C>(kTile * ld);
    ds = arena.take<C>(kTile * ld);
    k = arena.take<C>(kTile * params.head_dim);
    v = arena.take<C>(kTile * params.head_dim);
    dk = arena.take<C>(kTile * width);
    dv = arena.take<C>(kTile * width);
    end = arena.next;
  }
};

template <typename C>
AAH_INLINE void add_rows(const AahParams& p, const Sequence& s, int32_t kv_head, Range rows, const C* from,
                         int64_t width, void* to) {
  const int64_t dim = p.head_dim;
  for (int32_t i = 0; i < rows.end - rows.begin; ++i) {
    const int64_t token = static_cast<int64_t>(s.k_batch) * p.kv_len + s.k_offset + rows.begin + i;
    C* out = static_cast<C*>(to) + (token * p.kv_heads + kv_head) * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] += from[i * width + d];
  }
}

template <typename C>
void backward_task(const Call& call, const Task& t, int64_t task_index, char* memory) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W, L = Vec<C>::L;
  const C log2e = static_cast<C>(1.4426950408889634);
  const AahParams& p = *call.params;
  const Sequence& s = call.sequences[t.sequence];
  const int32_t lanes = t.q_end - t.q_begin, count = (lanes + L - 1) / L;
  const int64_t dim = p.head_dim, bytes = element_bytes(p.dtype);
  const BackwardScratch<C> m(p, lanes, reinterpret_cast<uintptr_t>(memory));
  const int64_t panel_size = m.width * L;
  const C scale = static_cast<C>(p.scale), cap = static_cast<C>(p.softcap) * log2e;
  const C factor = p.softcap != 0 ? static_cast<C>(p.scale / p.softcap) : scale * log2e;
  const C* sink_logits = static_cast<const C*>(p.sink_logits);
  C sink_gradient = 0;

  for (int32_t i = 0; i < count; ++i) {
    Panel<C>& panel = m.panels[i];
    panel_bounds<C>(p, s, t, i * L, lanes, panel);
    C *q = m.q + i * L * m.width, *dout = m.dout + i * L * m.width;
    query_rows<C>(p, s, t, p.q, panel.first, panel.lanes, L, q, m.width);
    query_rows<C>(p, s, t, p.dout, panel.first, panel.lanes, L, dout, m.width);
    C* out = m.dqt;  // dQ^T is not in use yet: room for the rows of the output
    query_rows<C>(p, s, t, p.out, panel.first, panel.lanes, L, out, m.width);
    for (int32_t l = 0; l < L; ++l) {
      panel.max[l] = infinity<C>();  // probability 0 for lanes without a query or without keys
      panel.sum[l] = 0;
      if (l >= panel.lanes) continue;
      const C lse = *lane_number<C>(p, s, t, p.lse, panel.first + l);
      const C dlse = p.dlse ? *lane_number<C>(p, s, t, p.dlse, panel.first + l) : 0;
      if (sees_nothing<C>(panel, l)) {
        if (sink_logits) sink_gradient += dlse;  // its log-sum-exp is the sink logit itself
        for (int64_t d = 0; d < m.width; ++d) q[l * m.width + d] = dout[l * m.width + d] = 0;
        continue;
      }
      // dS = P (dP - delta): delta is the same for all keys, the learned sink (dP = 0) among them
      V sum = {};
      for (int64_t d = 0; d < m.width; d += W) {
        sum += load<C>(out + l * m.width + d) * load<C>(dout + l * m.width + d);
      }
      C delta = -dlse;
      for (int x = 0; x < W; ++x) delta += sum[x];
      panel.max[l] = lse * log2e;
      panel.sum[l] = delta * scale;
      if (sink_logits) {
        const C x = sink_logits[t.head] - lse;
        sink_gradient -= static_cast<C>(sizeof(C) == 8 ? __builtin_exp(x) : __builtin_expf(x)) * delta;
      }
    }
    for (int32_t v = 0; v < panel.vectors; ++v) {
      transpose_in<C>(q + v * W * m.width, m.width, m.qt + i * panel_size + v * W, L, m.width, factor);
      transpose_in<C>(dout + v * W * m.width, m.width, m.dot + i * panel_size + v * W, L, m.width, scale);
    }
  }
  if (call.d_sink_partial) static_cast<C*>(call.d_sink_partial)[task_index] = sink_gradient;
  __builtin_memset(m.dqt, 0, count * panel_size * sizeof(C));

  int64_t ticket = t.ticket_base;
  for (int part = 0; part < 2; ++part) {
    const int32_t tile_begin = part ? t.band_tile : t.sink_tile, tile_end = part ? t.band_tile_end : t.sink_tile_end;
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      const int32_t low = tile * kTile, high = min_i(low + kTile, s.kv_len);
      const Range rows = visited_rows<C>(m.panels, count, low, high);
      const int32_t n = max_i(rows.end - rows.begin, 0);
      if (n > 0) {
        const C* k = key_rows<C>(p, p.k, s, t.kv_head, rows.begin, rows.end, m.k);
        const C* v = key_rows<C>(p, p.v, s, t.kv_head, rows.begin, rows.end, m.v);
        Range touched[kTile];
        for (int32_t b = 0; b * kRows < n; ++b) touched[b] = Range{AAH_UNLIMITED, 0};
        for (int32_t i = 0; i < count; ++i) {
          const Panel<C>& panel = m.panels[i];
          Range ranges[2];
          const int parts = panel_ranges<C>(panel, low, high, ranges);
          const int64_t lane_bytes = panel.vectors * W * sizeof(C);
          int32_t done = rows.begin;  // rows of this panel that are written
          for (int r = 0; r <= parts; ++r) {
            // keys between the ranges are not seen by this panel, but others of its block of rows may be
            const int32_t next = r < parts ? ranges[r].begin : rows.end;
            for (int32_t j = done; j < next; ++j) {
              __builtin_memset(m.p + (j - rows.begin) * m.ld + i * L, 0, lane_bytes);
              __builtin_memset(m.ds + (j - rows.begin) * m.ld + i * L, 0, lane_bytes);
            }
            if (r == parts) break;
            done = ranges[r].end;
            const int64_t skip = ranges[r].begin - rows.begin;
            const auto run = panel.vectors == 1   ? backward_range<C, 1>
                             : panel.vectors == 2 ? backward_range<C, 2>
                                                  : backward_range<C, 3>;
            run(panel, m.qt + i * panel_size, m.dot + i * panel_size, m.dqt + i * panel_size, k + skip * dim,
                v + skip * dim, ranges[r], needs_mask<C>(panel, ranges[r]), cap, dim, m.p + skip * m.ld + i * L,
                m.ds + skip * m.ld + i * L, m.ld);
            for (int64_t b = skip / kRows; b * kRows < done - rows.begin; ++b) {
              touched[b].begin = min_i(touched[b].begin, panel.first);
              touched[b].end = panel.first + panel.lanes;
            }
          }
        }
        for (int32_t b = 0; b * kRows < n; ++b) touched[b].begin = min_i(touched[b].begin, touched[b].end);
        weighted_sum<C>(m.p, m.ld, n, touched, m.dout, m.width, m.dv);
        weighted_sum<C>(m.ds, m.ld, n, touched, m.q, m.width, m.dk);
      }

      int32_t* turn = call.turns + s.turn_base + static_cast<int64_t>(t.kv_head) * ((s.kv_len + kTile - 1) / kTile) + tile;
      const int32_t mine = call.tickets[ticket++];
      while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine) call.relax();
      if (n > 0) {
        add_rows<C>(p, s, t.kv_head, rows, m.dk, m.width, call.dk);
        add_rows<C>(p, s, t.kv_head, rows, m.dv, m.width, call.dv);
      }
      __atomic_store_n(turn, mine + 1, __ATOMIC_RELEASE);
    }
  }

  for (int32_t i = 0; i < count; ++i) {
    const Panel<C>& panel = m.panels[i];
    for (int32_t v = 0; v < panel.vectors; ++v) {
      C* out = m.q;  // done with: room for rows of dQ
      transpose_out<C>(m.dqt + i * panel_size + v * W, L, out, m.width, m.width, splat<C>(1));
      for (int32_t x = 0; x < min_i(W, panel.lanes - v * W); ++x) {
        const int32_t lane = panel.first + v * W + x;
        store_row(p.dtype, out + x * m.width,
                  const_cast<char*>(row_of(p.dq, s.q_batch, s.q_offset + query_of_lane(t, lane), t.head, bytes)), dim);
      }
    }
  }
}

}  // namespace
}  // namespace AAH_ISA
}  // namespace aah
