// A torch-free check of the CPU kernels: random shapes against a naive loop in double over aah_sees(), for builds
// with sanitizers (tests/test_native.py). Every tensor is an allocation of exactly its size, rows of padding are NaN,
// and outputs start as NaN, so a read or a missing write outside the rule is seen.
//
//   grid <cases> <threads> <seed>
//
// With AAH_SIM it checks the CUDA forward kernel for the head size AAH_DIM on its emulator instead (tests/test_sim.py).
#include "../include/aah_rule.h"
#include "tensors.h"

#if defined(AAH_SIM)
extern "C" int aah_sim_fwd(const AahParams* params, int64_t max_q, int64_t max_k, int processors, int most, uint64_t seed,
                           int lazy, int* splits, char* error, int error_bytes);
extern "C" const char* aah_cpu_isa(void) { return "emulated GPU"; }
#else
#include "stream.h"
#endif

namespace {

#if defined(AAH_SIM)
constexpr bool kBackward = false;
bool computed(const AahParams& p, int number, int32_t) {
  char error[500] = "";
  int splits = 0;
  const int most = static_cast<int>(pick(0, 2)), lazy = static_cast<int>(pick(0, 1));
  const int status = aah_sim_fwd(&p, p.q_len, p.kv_len, 1, most, rng() % 100, lazy, &splits, error, sizeof(error));
  if (status) std::printf("case %d: status %d %s\n", number, status, error);
  return status == AAH_OK;
}
#else
constexpr bool kBackward = true;
bool computed(const AahParams& p, int number, int32_t threads) {
  const AahThreads pool = {nullptr, threads, run_threads};
  int status = aah_cpu_fwd(&p, &pool);
  if (!status) status = aah_cpu_bwd(&p, &pool);
  if (status) std::printf("case %d: %s\n", number, aah_status_text(status));
  return status == AAH_OK;
}
#endif

bool run_case(int number, int32_t threads) {
  AahParams p = {};
  p.version = AAH_PARAMS_VERSION;
  p.dtype = kBackward ? choose({AAH_F32, AAH_F32, AAH_F64, AAH_BF16, AAH_F16}) : choose({AAH_F32, AAH_BF16, AAH_F16});
  p.batch = pick(1, 2);
  p.kv_heads = pick(1, 2);
  const int64_t group = choose<int64_t>({1, 2, 3, 8});
  p.q_heads = p.kv_heads * group;
#if defined(AAH_SIM)
  p.head_dim = AAH_DIM <= 64 ? 8 * choose<int64_t>({1, 2, 3, 5, 8}) : AAH_DIM - 8 * pick(0, 1);
#else
  p.head_dim = 8 * choose<int64_t>({1, 2, 3, 5, 8, 9, 16});
#endif
  p.kv_len = choose<int64_t>({1, 2, 7, 63, 64, 65, 100, 130, 270});  // 270: more than a task's 192 queries
  const int dt = p.dtype;
  const bool packed = pick(0, 3) == 0;
  p.q_len = packed || pick(0, 1) ? p.kv_len : pick(1, p.kv_len);
  std::vector<int32_t> cu = {0}, q_start, start, end;
  if (packed) {
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t t = 0; t < p.kv_len;) {
        t = std::min<int64_t>(p.kv_len, t + pick(0, 60));
        cu.push_back(static_cast<int32_t>(b * p.kv_len + t));
      }
    }
    p.sequences = static_cast<int64_t>(cu.size()) - 1;
  } else {
    p.sequences = p.batch;
  }
  for (int64_t i = 0; i < p.sequences; ++i) {
    const int64_t kv = packed ? cu[i + 1] - cu[i] : p.kv_len;
    q_start.push_back(static_cast<int32_t>(packed ? 0 : pick(0, p.kv_len - p.q_len)));
    start.push_back(static_cast<int32_t>(choose<int64_t>({0, 0, -2, pick(0, kv)})));
    end.push_back(static_cast<int32_t>(choose<int64_t>({kv, kv, pick(0, kv)})));
  }
  std::vector<int32_t> window;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    window.push_back(static_cast<int32_t>(
        choose<int64_t>({1, 2, 16, 63, 64, 65, p.kv_len, p.kv_len + 1, AAH_UNLIMITED})));
  }
  p.window = window.data();
  p.q_start = q_start.data();
  p.start = start.data();
  p.end = end.data();
  if (packed) p.cu_q = p.cu_k = cu.data();
  p.sinks = static_cast<int32_t>(pick(0, 5));
  p.limit = choose<int32_t>({AAH_UNLIMITED, AAH_UNLIMITED, 1, 20});
  p.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
  p.softcap = choose({0.0, 0.0, 4.0});

  Tensor q(dt, p.batch, p.q_len, p.q_heads, p.head_dim), out(dt, p.batch, p.q_len, p.q_heads, p.head_dim);
  Tensor dout(dt, p.batch, p.q_len, p.q_heads, p.head_dim), dq(dt, p.batch, p.q_len, p.q_heads, p.head_dim);
  Tensor k(dt, p.batch, p.kv_len, p.kv_heads, p.head_dim), v(dt, p.batch, p.kv_len, p.kv_heads, p.head_dim);
  Tensor dk(dt, p.batch, p.kv_len, p.kv_heads, p.head_dim), dv(dt, p.batch, p.kv_len, p.kv_heads, p.head_dim);
  Numbers lse(dt, p.batch * p.q_heads * p.q_len), dlse(dt, p.batch * p.q_heads * p.q_len);
  Numbers logits(dt, p.q_heads), dlogits(dt, p.q_heads);
  for (int64_t i = 0; i < p.batch * p.q_heads * p.q_len; ++i) dlse.set(i, pick(-8, 8) / 8.0);
  for (int64_t h = 0; h < p.q_heads; ++h) logits.set(h, pick(-8, 8) / 4.0);
  const bool sinks = pick(0, 1);
  p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
  p.dout = dout.view, p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
  p.lse = lse.data(), p.dlse = dlse.data(), p.d_sink_logits = dlogits.data();
  if (sinks) p.sink_logits = logits.data();

  // real tokens get numbers, padding stays NaN
  struct Where {
    int64_t q_batch, q_offset, q_len, k_batch, k_offset, kv_len;
  };
  std::vector<Where> where;
  for (int64_t i = 0; i < p.sequences; ++i) {
    Where w = {i, 0, p.q_len, i, 0, p.kv_len};
    if (packed) w = {cu[i] / p.kv_len, cu[i] % p.kv_len, cu[i + 1] - cu[i], cu[i] / p.kv_len, cu[i] % p.kv_len, cu[i + 1] - cu[i]};
    where.push_back(w);
    for (int64_t t = 0; t < w.kv_len; ++t) {
      for (int64_t h = 0; t >= start[i] && t < end[i] && h < p.kv_heads; ++h) {
        k.fill_row(w.k_batch, w.k_offset + t, h);
        v.fill_row(w.k_batch, w.k_offset + t, h);
      }
    }
    for (int64_t t = 0; t < w.q_len; ++t) {
      for (int64_t h = 0; t + q_start[i] >= start[i] && t + q_start[i] < end[i] && h < p.q_heads; ++h) {
        q.fill_row(w.q_batch, w.q_offset + t, h);
        dout.fill_row(w.q_batch, w.q_offset + t, h);
      }
    }
  }

  if (!computed(p, number, threads)) return false;

  const double tolerance = dt == AAH_F64 ? 1e-12 : dt == AAH_F32 ? 2e-5 : dt == AAH_F16 ? 6e-3 : 4e-2;
  const int64_t dim = p.head_dim;
  std::vector<double> want_dk(p.batch * p.kv_len * p.kv_heads * dim, 0.0), want_dv(want_dk), want_logits(p.q_heads, 0.0);
  std::vector<double> size_dk(want_dk), size_dv(want_dk);
  bool good = true;
  for (int64_t i = 0; i < p.sequences && good; ++i) {
    const Where& w = where[i];
    for (int64_t h = 0; h < p.q_heads; ++h) {
      const int64_t g = h / group;
      for (int64_t t = 0; t < w.q_len; ++t) {
        const AahSpan span = aah_visible(static_cast<int32_t>(q_start[i] + t), window[h], p.sinks, p.limit, start[i], end[i],
                                         static_cast<int32_t>(w.kv_len));
        std::vector<double> score(w.kv_len, -INFINITY), slope(w.kv_len, 1.0);
        double top = sinks ? logits.get(h) : -INFINITY, sum = 0;
        const auto key = [&](const Tensor& x, int64_t j, int64_t d) { return x.get(w.k_batch, w.k_offset + j, g, d); };
        for (int64_t j = 0; j < w.kv_len; ++j) {
          if (!aah_sees(span, static_cast<int32_t>(j))) continue;
          double s = 0;
          for (int64_t d = 0; d < dim; ++d) s += q.get(w.q_batch, w.q_offset + t, h, d) * key(k, j, d);
          s *= p.scale;
          if (p.softcap != 0) {
            const double c = std::tanh(s / p.softcap);
            slope[j] = 1 - c * c;
            s = c * p.softcap;
          }
          score[j] = s;
          top = std::fmax(top, s);
        }
        const bool any = top > -INFINITY;
        for (int64_t j = 0; j < w.kv_len; ++j) sum += any ? std::exp(score[j] - top) : 0;
        if (sinks) sum += std::exp(logits.get(h) - top);
        const int64_t at = (w.q_batch * p.q_heads + h) * p.q_len + w.q_offset + t;
        const double want_lse = any ? top + std::log(sum) : -INFINITY;
        good = good && close(lse.get(at), want_lse, std::fabs(top), dt == AAH_F64 ? 1e-12 : 1e-5, "lse", number);
        double delta = -dlse.get(at);
        std::vector<double> o(dim, 0.0), prob(w.kv_len, 0.0), dq_row(dim, 0.0);
        for (int64_t j = 0; j < w.kv_len; ++j) {
          if (score[j] == -INFINITY) continue;
          prob[j] = std::exp(score[j] - want_lse);
          for (int64_t d = 0; d < dim; ++d) o[d] += prob[j] * key(v, j, d);
        }
        const bool sees = span.begin < span.end || span.sink_begin < span.sink_end;
        for (int64_t d = 0; d < dim; ++d) {
          const double got = out.get(w.q_batch, w.q_offset + t, h, d);
          good = good && close(got, o[d], 4, tolerance, "out", number);
          if (sees) delta += dout.get(w.q_batch, w.q_offset + t, h, d) * o[d];
        }
        if (!kBackward) continue;
        if (sinks) want_logits[h] -= std::exp(logits.get(h) - want_lse) * delta;
        double dq_size = 0;
        for (int64_t j = 0; j < w.kv_len; ++j) {
          if (score[j] == -INFINITY) continue;
          double dp = -delta;
          for (int64_t d = 0; d < dim; ++d) dp += dout.get(w.q_batch, w.q_offset + t, h, d) * key(v, j, d);
          const double ds = prob[j] * dp * slope[j] * p.scale, size = prob[j] * p.scale * (10 + std::fabs(dp));
          dq_size += 4 * size;
          for (int64_t d = 0; d < dim; ++d) {
            const int64_t to = (((w.k_batch * p.kv_len) + w.k_offset + j) * p.kv_heads + g) * dim + d;
            dq_row[d] += ds * key(k, j, d);
            want_dk[to] += ds * q.get(w.q_batch, w.q_offset + t, h, d);
            want_dv[to] += prob[j] * dout.get(w.q_batch, w.q_offset + t, h, d);
            size_dk[to] += 4 * size;
            size_dv[to] += 4 * prob[j];
          }
        }
        for (int64_t d = 0; d < dim; ++d) {
          good = good && close(dq.get(w.q_batch, w.q_offset + t, h, d), dq_row[d], dq_size, tolerance, "dq", number);
        }
      }
    }
  }
  for (int64_t b = 0; kBackward && b < p.batch && good; ++b) {
    for (int64_t t = 0; t < p.kv_len; ++t) {
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = ((b * p.kv_len + t) * p.kv_heads + h) * dim + d;
          good = good && close(dk.get(b, t, h, d), want_dk[at], size_dk[at], tolerance, "dk", number);
          good = good && close(dv.get(b, t, h, d), want_dv[at], size_dv[at], tolerance, "dv", number);
        }
      }
    }
  }
  for (int64_t h = 0; kBackward && sinks && h < p.q_heads && good; ++h) {
    good = close(dlogits.get(h), want_logits[h], 100, tolerance, "d_sink_logits", number);
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 50, threads = argc > 2 ? std::atoi(argv[2]) : 2;
  rng.seed(argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1);
  int bad = 0;
  for (int i = 0; i < cases; ++i) bad += !run_case(i, threads);
  int total = cases;
#if !defined(AAH_SIM)
  for (int i = 0; i < cases; ++i) bad += !run_stream(i, threads);
  total += cases;
#endif
  std::printf("%s: %d of %d cases right, largest error %.2f of what is allowed\n", aah_cpu_isa(), total - bad, total, worst);
  return bad != 0;
}
