// Streams of tokens through aah_cpu_decode and aah_cpu_cache_append against a naive loop over the full history.
#pragma once

#include <algorithm>

#include "../include/aah_rule.h"
#include "tensors.h"

namespace {

// Positions from .. from + n - 1 of a history, in a tensor of their own.
void copy_positions(const Tensor& history, int64_t from, const Tensor& to) {
  for (int64_t b = 0; b < to.batch; ++b) {
    for (int64_t t = 0; t < to.length; ++t) {
      for (int64_t h = 0; h < to.heads; ++h) {
        std::memcpy(to.at(b, t, h, 0), history.at(b, from + t, h, 0), to.dim * element_bytes(to.dtype));
      }
    }
  }
}

// One query of one head over the history; the log-sum-exp is returned.
double naive_query(const AahCacheParams& p, const Tensor& q, const Tensor& k, const Tensor& v, int64_t b, int64_t t,
                   int64_t h, bool sink, double logit, std::vector<double>* out) {
  const int64_t g = h / (p.q_heads / p.kv_heads), keys = p.past + p.q_len;
  const AahSpan span = aah_visible(static_cast<int32_t>(p.past + t), p.window[h], p.sinks, p.limit, p.first[b], AAH_UNLIMITED,
                                   static_cast<int32_t>(keys));
  std::vector<double> score(keys, -INFINITY);
  double top = sink ? logit : -INFINITY;
  for (int64_t j = 0; j < keys; ++j) {
    if (!aah_sees(span, static_cast<int32_t>(j))) continue;
    double s = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) s += q.get(b, t, h, d) * k.get(b, j, g, d);
    s *= p.scale;
    score[j] = p.softcap != 0 ? p.softcap * std::tanh(s / p.softcap) : s;
    top = std::fmax(top, score[j]);
  }
  out->assign(p.head_dim, 0.0);
  if (top == -INFINITY) return top;
  double sum = sink ? std::exp(logit - top) : 0;
  for (int64_t j = 0; j < keys; ++j) sum += std::exp(score[j] - top);
  const double lse = top + std::log(sum);
  for (int64_t j = 0; j < keys; ++j) {
    if (score[j] == -INFINITY) continue;
    for (int64_t d = 0; d < p.head_dim; ++d) (*out)[d] += std::exp(score[j] - lse) * v.get(b, j, g, d);
  }
  return lse;
}

bool run_stream(int number, int32_t threads) {
  AahCacheParams p = {};
  p.version = AAH_CACHE_PARAMS_VERSION;
  p.dtype = choose({AAH_F32, AAH_F32, AAH_F64, AAH_BF16, AAH_F16});
  p.batch = pick(1, 2);
  p.kv_heads = pick(1, 3);
  const int64_t group = choose<int64_t>({1, 2, 3, 4, 5, 8});
  p.q_heads = p.kv_heads * group;
  p.head_dim = 8 * choose<int64_t>({1, 2, 3, 5, 8, 10, 16});
  p.sinks = static_cast<int32_t>(pick(0, 5));
  p.limit = choose<int32_t>({AAH_UNLIMITED, AAH_UNLIMITED, 1, 20});
  p.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
  p.softcap = choose({0.0, 0.0, 4.0});
  const int dt = p.dtype;
  std::vector<int64_t> chunks = {choose<int64_t>({0, 1, 30, 300})};  // 300: several chunks of keys
  for (int64_t n = pick(1, 8); n > 0; --n) chunks.push_back(choose<int64_t>({1, 1, 3, 16}));
  int64_t length = 0;
  for (int64_t n : chunks) length += n;
  std::vector<int32_t> window, offset = {static_cast<int32_t>(pick(0, 2))}, first;  // slots of nobody at both ends
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    int64_t widest = 1;
    for (int64_t i = 0; i < group; ++i) {
      window.push_back(static_cast<int32_t>(choose<int64_t>({1, 2, 5, 16, 17, 64, AAH_UNLIMITED})));
      widest = std::max<int64_t>(widest, std::min<int64_t>(window.back(), length));
    }
    offset.push_back(static_cast<int32_t>(offset.back() + p.sinks + widest - 1 + choose<int64_t>({0, 0, 3})));
  }
  for (int64_t b = 0; b < p.batch; ++b) first.push_back(static_cast<int32_t>(choose<int64_t>({0, 0, 3, pick(0, length)})));
  p.window = window.data(), p.offset = offset.data(), p.first = first.data();
  p.slots = offset.back() + pick(0, 2);
  Numbers logits(dt, p.q_heads);
  for (int64_t h = 0; h < p.q_heads; ++h) logits.set(h, static_cast<double>(pick(-8, 8)) / 4.0);
  const bool sink = pick(0, 1);
  if (sink) p.sink_logits = logits.data();

  Tensor k_cache(dt, p.batch, p.slots, 1, p.head_dim), v_cache(dt, p.batch, p.slots, 1, p.head_dim);
  Tensor q_all(dt, p.batch, length, p.q_heads, p.head_dim);
  Tensor k_all(dt, p.batch, length, p.kv_heads, p.head_dim), v_all(dt, p.batch, length, p.kv_heads, p.head_dim);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = first[b]; t < length; ++t) {
      for (int64_t h = 0; h < p.q_heads; ++h) q_all.fill_row(b, t, h);
      for (int64_t h = 0; h < p.kv_heads; ++h) k_all.fill_row(b, t, h), v_all.fill_row(b, t, h);
    }
  }
  p.k_cache = k_cache.view, p.v_cache = v_cache.view;
  const AahThreads pool = {nullptr, threads, run_threads};
  const double tolerance = dt == AAH_F64 ? 1e-12 : dt == AAH_F32 ? 2e-5 : dt == AAH_F16 ? 6e-3 : 4e-2;
  bool good = true;
  for (int64_t n : chunks) {
    p.q_len = n;
    Tensor q(dt, p.batch, n, p.q_heads, p.head_dim), out(dt, p.batch, n, p.q_heads, p.head_dim);
    Tensor k(dt, p.batch, n, p.kv_heads, p.head_dim), v(dt, p.batch, n, p.kv_heads, p.head_dim);
    Numbers lse(dt, p.batch * p.q_heads * n);
    copy_positions(q_all, p.past, q), copy_positions(k_all, p.past, k), copy_positions(v_all, p.past, v);
    p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view, p.lse = lse.data();
    if (int status = aah_cpu_decode(&p, &pool)) return std::printf("stream %d: %s\n", number, aah_status_text(status)), false;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.q_heads; ++h) {
        for (int64_t t = 0; t < n && good; ++t) {
          std::vector<double> want;
          const double want_lse = naive_query(p, q, k_all, v_all, b, t, h, sink, logits.get(h), &want);
          good = close(lse.get((b * p.q_heads + h) * n + t), want_lse, std::fabs(want_lse), dt == AAH_F64 ? 1e-12 : 1e-5,
                       "lse of a stream", number);
          for (int64_t d = 0; d < p.head_dim; ++d) {
            good = good && close(out.get(b, t, h, d), want[d], 4, tolerance, "out of a stream", number);
          }
        }
      }
    }
    if (int status = aah_cpu_cache_append(&p, &pool)) return std::printf("stream %d: %s\n", number, aah_status_text(status)), false;
    p.past += n;
  }
  // what must be refused before memory is touched
  const int32_t border = offset.back();
  offset.back() = static_cast<int32_t>(p.slots + 1);
  good = good && aah_cpu_decode(&p, &pool) == AAH_ERROR_CACHE && aah_cpu_cache_append(&p, &pool) == AAH_ERROR_CACHE;
  offset.back() = border;
  first[0] = -1;
  good = good && aah_cpu_decode(&p, &pool) == AAH_ERROR_CACHE && aah_cpu_cache_append(&p, &pool) == AAH_ERROR_CACHE;
  if (!good) std::printf("stream %d failed\n", number);
  return good;
}

}  // namespace
