// Attention of few queries over a ragged ring cache. Part of attention_kernel.h.
//
// Decoding reads every key once and does little with it, so here a vector holds neighbouring channels of one key: with
// queries as lanes, as in forward.h, one query would leave all lanes but one empty. The queries of a KV head (q_len of
// each query head of its group) go in blocks of kBlock over a tile of keys while it is in the first-level cache.
#pragma once

#include "panel.h"

namespace aah {
namespace AAH_ISA {
namespace {

constexpr int64_t kTileBytes = 16384;  // of K, and of V

template <typename C>
AAH_INLINE int64_t channel_width(const AahCacheParams& p) {
  return round_up(p.head_dim, Vec<C>::W);
}

AAH_INLINE int32_t queries_per_list(const AahCacheParams& p) {
  return static_cast<int32_t>(p.q_heads / p.kv_heads * p.q_len);
}

// W sums of products at a time, kKeys keys of kBlock queries, become one vector of scores.
template <typename C>
struct Block {
  static constexpr int W = Vec<C>::W, kKeys = W < 4 ? W : 4, kBlock = W / kKeys;
};

// Keys of one query, numbered as in KeyList: sinks, then band.
struct Seen {
  Range part[2];
};

template <typename C>
struct DecodeScratch {
  Seen* seen;
  C *q, *p, *decay, *k, *v;
  uintptr_t end;

  DecodeScratch(const AahCacheParams& params, uintptr_t memory) {
    const int64_t n = queries_per_list(params), width = channel_width<C>(params);
    Arena arena = {memory};
    seen = arena.take<Seen>(n);
    q = arena.take<C>(n * width);
    p = arena.take<C>(n * kTile);
    decay = arena.take<C>(n);
    k = arena.take<C>(kTile * width);
    v = arena.take<C>(kTile * width);
    end = arena.next;
  }
};

// What a chunk leaves behind, per query: maximum of the scores (base 2), sum (in W parts) and output relative to it.
template <typename C>
struct Partial {
  C *top, *sum, *out;
  uintptr_t end;

  Partial(const AahCacheParams& params, uintptr_t memory) {
    const int64_t n = queries_per_list(params);
    Arena arena = {memory};
    top = arena.take<C>(n);
    sum = arena.take<C>(n * Vec<C>::W);
    out = arena.take<C>(n * channel_width<C>(params));
    end = arena.next;
  }
};

AAH_INLINE int32_t key_index(const KeyList& list, int32_t rank) {
  if (rank < list.kept) return rank;
  return list.kept + max_i(rank - list.oldest, 0);
}

AAH_INLINE AahSpan query_span(const AahCacheParams& p, const KeyList& list, int32_t query) {
  const int32_t q_len = static_cast<int32_t>(p.q_len), head = query / q_len;
  const int64_t rank = p.past + query % q_len - list.first, keys = p.past + p.q_len - list.first;
  const int64_t group = p.q_heads / p.kv_heads;
  return aah_visible(static_cast<int32_t>(rank), p.window[list.kv_head * group + head], p.sinks, p.limit, 0, AAH_UNLIMITED,
                     static_cast<int32_t>(keys < 0 ? 0 : keys));
}

// Rows of `width` numbers: in place where storage is of the accumulator type and fills whole vectors, else copied.
template <typename C>
AAH_INLINE const C* vector_rows(int32_t dtype, const char* base, int64_t stride, int32_t n, int64_t dim, int64_t width,
                                C* copy, int64_t* ld) {
  if (element_bytes(dtype) == static_cast<int64_t>(sizeof(C)) && dim == width) {
    *ld = stride / static_cast<int64_t>(sizeof(C));
    return reinterpret_cast<const C*>(base);
  }
  for (int32_t i = 0; i < n; ++i) {
    load_row(dtype, base + i * stride, copy + i * width, dim);
    for (int64_t d = dim; d < width; ++d) copy[i * width + d] = 0;
  }
  *ld = width;
  return copy;
}

// One vector of sums over the lanes of each of W vectors: a transposition that adds.
template <typename C, int S>
AAH_INLINE void add_lanes(typename Vec<C>::V* r) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W;
  typedef std::make_integer_sequence<int, W> Lanes;
#pragma GCC unroll 8
  for (int i = 0; i < S; ++i) {
    const V a = r[i], b = r[i + S];
    r[i] = swap_low<V, I, W, S>(a, b, Lanes()) + swap_high<V, I, W, S>(a, b, Lanes());
  }
  if constexpr (S > 1) add_lanes<C, S / 2>(r);
}

// s[j][i] = q[j] . k[i] for j < NQ, i < n.
template <typename C, int NQ>
AAH_INLINE void dot_rows(const C* q, int64_t ldq, const C* k, int64_t ld, int32_t n, int64_t width, C* s) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W, K = Block<C>::kKeys;
  for (int32_t row = 0; row < n; row += K) {
    const C* rows[K];
    V acc[W];
    block_rows<C, K>(k, ld, row, n, rows);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] = V{};
    for (int64_t d = 0; d < width; d += W) {
      V x[K];
#pragma GCC unroll 4
      for (int r = 0; r < K; ++r) x[r] = load<C>(rows[r] + d);
#pragma GCC unroll 4
      for (int j = 0; j < NQ; ++j) {
        const V y = load<C>(q + j * ldq + d);
#pragma GCC unroll 4
        for (int r = 0; r < K; ++r) acc[j * K + r] += y * x[r];
      }
    }
    add_lanes<C, W / 2>(acc);
    C sums[W];
    store<C>(sums, acc[0]);
#pragma GCC unroll 4
    for (int j = 0; j < NQ; ++j) __builtin_memcpy(s + j * kTile + row, sums + j * K, K * sizeof(C));
  }
}

// out[j][d] = out[j][d] * decay[j] + sum over i < n of p[j][i] * v[i][d], for j < NQ and NV vectors of channels.
template <typename C, int NQ, int NV>
AAH_INLINE void add_values(const C* p, const C* v, int64_t ld, int32_t n, const C* decay, C* out, int64_t ldo) {
  typedef typename Vec<C>::V V;
  constexpr int W = Vec<C>::W;
  V acc[NQ][NV];
#pragma GCC unroll 4
  for (int j = 0; j < NQ; ++j)
#pragma GCC unroll 4
    for (int x = 0; x < NV; ++x) acc[j][x] = V{};
  for (int32_t i = 0; i < n; ++i) {
    V row[NV];
#pragma GCC unroll 4
    for (int x = 0; x < NV; ++x) row[x] = load<C>(v + i * ld + x * W);
#pragma GCC unroll 4
    for (int j = 0; j < NQ; ++j) {
      const V weight = V{} + p[j * kTile + i];
#pragma GCC unroll 4
      for (int x = 0; x < NV; ++x) acc[j][x] += weight * row[x];
    }
  }
  // adding a tile's own sum, instead of carrying on with the running one, keeps rounding errors small
#pragma GCC unroll 4
  for (int j = 0; j < NQ; ++j)
#pragma GCC unroll 4
    for (int x = 0; x < NV; ++x) {
      C* o = out + j * ldo + x * W;
      store<C>(o, load<C>(o) * decay[j] + acc[j][x]);
    }
}

template <typename V, typename I, int S, int... X>
AAH_INLINE V swap_neighbours(V v, std::integer_sequence<int, X...>) {
  return AAH_SHUFFLE(I, v, v, (X ^ S)...);
}

// The largest lane, in all lanes.
template <typename C, int S = Vec<C>::W / 2>
AAH_INLINE typename Vec<C>::V largest(typename Vec<C>::V v) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  const V other = swap_neighbours<V, I, S>(v, std::make_integer_sequence<int, Vec<C>::W>());
  v = other > v ? other : v;
  if constexpr (S > 1) v = largest<C, S / 2>(v);
  return v;
}

template <typename C>
AAH_INLINE C exp2_one(C x) {
  return exp2_vec(splat<C>(x))[0];
}

// Scores s of n keys, of which one query sees those in `seen`, become probabilities relative to the running maximum, 0
// where not seen. The running sum has W parts. Returns the decay of what has been summed so far.
template <typename C>
AAH_INLINE C probabilities(C* s, int32_t n, Range seen, C cap, C* running_top, C* running_sum) {
  typedef typename Vec<C>::V V;
  typedef typename Vec<C>::I I;
  constexpr int W = Vec<C>::W;
  I lane;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) lane[i] = i;
  const V old = splat<C>(*running_top);
  V now = old;
  for (int32_t i = 0; i < n; i += W) {
    const I key = lane + static_cast<typename Vec<C>::Int>(i);
    V x = load<C>(s + i);
    if (cap != 0) x = tanh_vec(x) * cap;
    x = (key >= seen.begin) & (key < seen.end) ? x : splat<C>(-infinity<C>());
    store<C>(s + i, x);
    now = x > now ? x : now;
  }
  now = largest<C>(now);
  const V base = now == splat<C>(-infinity<C>()) ? V{} : now;  // -inf - -inf is NaN
  const V decay = exp2_vec(old - base);
  V total = load<C>(running_sum) * decay;
  for (int32_t i = 0; i < n; i += W) {
    const V e = exp2_vec(load<C>(s + i) - base);
    store<C>(s + i, e);
    total += e;
  }
  store<C>(running_sum, total);
  *running_top = now[0];
  return decay[0];
}

// A tile of n keys against NQ queries: k gives p, then v and p are added to the output.
template <typename C, int NQ>
__attribute__((noinline)) void block_scores(const C* q, const C* k, int64_t ld, int32_t n, int64_t width, C* p) {
  dot_rows<C, NQ>(q, width, k, ld, n, width, p);
}

template <typename C, int NQ>
__attribute__((noinline)) void block_values(const C* p, const C* v, int64_t ld, int32_t n, int64_t width, const C* decay,
                                            C* out) {
  constexpr int W = Vec<C>::W;
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) add_values<C, NQ, 4>(p, v + d, ld, n, decay, out + d, width);
  if (d + 2 * W <= width) {
    add_values<C, NQ, 2>(p, v + d, ld, n, decay, out + d, width);
    d += 2 * W;
  }
  if (d < width) add_values<C, NQ, 1>(p, v + d, ld, n, decay, out + d, width);
}

template <typename C>
void decode_chunk(const DecodeCall& call, int32_t index, char* memory) {
  constexpr int B = Block<C>::kBlock, B2 = B < 2 ? B : 2, B3 = B < 3 ? B : 3;
  const AahCacheParams& p = *call.params;
  const Chunk chunk = call.chunks[index];
  const KeyList& list = call.lists[chunk.list];
  const int32_t n = queries_per_list(p), q_len = static_cast<int32_t>(p.q_len);
  const int64_t dim = p.head_dim, width = channel_width<C>(p), bytes = element_bytes(p.dtype);
  const int64_t group = p.q_heads / p.kv_heads;
  const DecodeScratch<C> m(p, reinterpret_cast<uintptr_t>(memory));
  const Partial<C> partial(p, reinterpret_cast<uintptr_t>(call.partials + index * call.partial_bytes));
  // Scores are kept in base 2, their scale folded into q; a soft cap works on unscaled tanh arguments.
  const C log2e = static_cast<C>(1.4426950408889634), cap = static_cast<C>(p.softcap) * log2e;
  const C factor = p.softcap != 0 ? static_cast<C>(p.scale / p.softcap) : static_cast<C>(p.scale) * log2e;

  for (int32_t i = 0; i < n; ++i) {
    const AahSpan span = query_span(p, list, i);
    const int32_t sinks = key_index(list, span.sink_begin), begin = key_index(list, span.begin);
    m.seen[i].part[0] = clip(sinks, key_index(list, span.sink_end), chunk.begin, chunk.end);
    m.seen[i].part[1] = clip(begin, key_index(list, span.end), chunk.begin, chunk.end);
    C* q = m.q + i * width;
    load_row(p.dtype, row_of(p.q, list.batch, i % q_len, static_cast<int32_t>(list.kv_head * group + i / q_len), bytes), q,
             dim);
    for (int64_t d = 0; d < dim; ++d) q[d] *= factor;
    for (int64_t d = dim; d < width; ++d) q[d] = 0;
    partial.top[i] = -infinity<C>();
  }
  __builtin_memset(partial.sum, 0, n * Vec<C>::W * sizeof(C));
  __builtin_memset(partial.out, 0, n * width * sizeof(C));

  const int32_t fit = static_cast<int32_t>(kTileBytes / (width * static_cast<int64_t>(sizeof(C)))) / 16 * 16;
  const int32_t step = min_i(max_i(fit, 16), kTile);
  for (int part = 0; part < 2; ++part) {
    for (int32_t x = 0; x < list.run_count; ++x) {
      const KeyRun& run = list.runs[x];
      const Range inside = clip(run.index, run.index + run.count, chunk.begin, chunk.end);
      for (int32_t low = inside.begin; low < inside.end; low += step) {
        const int32_t high = min_i(low + step, inside.end);
        Range rows = {high, low};  // hull of what the queries see
        for (int32_t i = 0; i < n; ++i) {
          const Range r = clip(m.seen[i].part[part].begin, m.seen[i].part[part].end, low, high);
          if (r.begin >= r.end) continue;
          rows.begin = min_i(rows.begin, r.begin);
          rows.end = max_i(rows.end, r.end);
        }
        if (rows.begin >= rows.end) continue;
        const int32_t at = rows.begin - run.index, count = rows.end - rows.begin;
        int64_t ldk, ldv;
        const C* k = vector_rows<C>(p.dtype, run.k + at * run.k_stride, run.k_stride, count, dim, width, m.k, &ldk);
        for (int32_t i = 0; i < n; i += B) {
          const int32_t queries = min_i(B, n - i);
          const auto scores = queries == 1 ? block_scores<C, 1> : queries == 2 ? block_scores<C, B2>
                            : queries == 3 ? block_scores<C, B3> : block_scores<C, B>;
          scores(m.q + i * width, k, ldk, count, width, m.p + i * kTile);
          for (int32_t j = i; j < i + queries; ++j) {
            const Range r = clip(m.seen[j].part[part].begin, m.seen[j].part[part].end, low, high);
            m.decay[j] = probabilities<C>(m.p + j * kTile, count, {r.begin - rows.begin, r.end - rows.begin}, cap,
                                          partial.top + j, partial.sum + j * Vec<C>::W);
          }
        }
        const C* v = vector_rows<C>(p.dtype, run.v + at * run.v_stride, run.v_stride, count, dim, width, m.v, &ldv);
        for (int32_t i = 0; i < n; i += B) {
          const int32_t queries = min_i(B, n - i);
          const auto values = queries == 1 ? block_values<C, 1> : queries == 2 ? block_values<C, B2>
                            : queries == 3 ? block_values<C, B3> : block_values<C, B>;
          values(m.p + i * kTile, v, ldv, count, width, m.decay + i, partial.out + i * width);
        }
      }
    }
  }
}

// The chunks of a list, in order, into its rows of the output.
template <typename C>
void decode_combine(const DecodeCall& call, int32_t index, char* memory) {
  const AahCacheParams& p = *call.params;
  const KeyList& list = call.lists[index];
  const int32_t n = queries_per_list(p), q_len = static_cast<int32_t>(p.q_len);
  const int64_t dim = p.head_dim, width = channel_width<C>(p), bytes = element_bytes(p.dtype);
  const int64_t group = p.q_heads / p.kv_heads;
  const C log2e = static_cast<C>(1.4426950408889634), ln2 = static_cast<C>(0.6931471805599453);
  C* row = DecodeScratch<C>(p, reinterpret_cast<uintptr_t>(memory)).k;  // a tile is longer than a row
  const auto partial = [&](int32_t chunk) {
    return Partial<C>(p, reinterpret_cast<uintptr_t>(call.partials + chunk * call.partial_bytes));
  };
  for (int32_t i = 0; i < n; ++i) {
    const int32_t head = static_cast<int32_t>(list.kv_head * group) + i / q_len, query = i % q_len;
    const AahSpan span = query_span(p, list, i);
    const bool empty = span.begin == span.end && span.sink_begin == span.sink_end;
    const C* logit = p.sink_logits ? static_cast<const C*>(p.sink_logits) + head : nullptr;
    char* out = const_cast<char*>(row_of(p.out, list.batch, query, head, bytes));
    C* lse = static_cast<C*>(p.lse) + (list.batch * p.q_heads + head) * p.q_len + query;
    if (empty) {
      __builtin_memset(out, 0, dim * bytes);
      *lse = logit ? *logit : -infinity<C>();
      continue;
    }
    C top = logit ? *logit * log2e : -infinity<C>();
    for (int32_t c = list.chunk_begin; c < list.chunk_end; ++c) {
      const C t = partial(c).top[i];
      top = t > top ? t : top;
    }
    const C base = top == -infinity<C>() ? 0 : top;
    C sum = logit ? exp2_one<C>(*logit * log2e - base) : 0;  // a key without a value: it only adds to the sum
    for (int64_t d = 0; d < width; ++d) row[d] = 0;
    for (int32_t c = list.chunk_begin; c < list.chunk_end; ++c) {
      const Partial<C> x = partial(c);
      C of_chunk = 0;
      for (int part = 0; part < Vec<C>::W; ++part) of_chunk += x.sum[i * Vec<C>::W + part];
      if (of_chunk == 0) continue;  // sees none of its keys
      const C weight = exp2_one<C>(x.top[i] - base);
      sum += weight * of_chunk;
      for (int64_t d = 0; d < width; ++d) row[d] += weight * x.out[i * width + d];
    }
    const C inverse = 1 / sum;
    for (int64_t d = 0; d < dim; ++d) row[d] *= inverse;
    store_row(p.dtype, row, out, dim);
    *lse = top * ln2 + static_cast<C>(sizeof(C) == 8 ? __builtin_log(sum) : __builtin_logf(sum));
  }
}

}  // namespace
}  // namespace AAH_ISA
}  // namespace aah
