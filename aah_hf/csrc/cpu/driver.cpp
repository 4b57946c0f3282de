// Chooses the instruction set and runs the work list on the caller's threads. Compiled for the baseline instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#include "runtime.h"
#include "work.h"

namespace aah {
namespace {

// --- instruction set -----------------------------------------------------------------------------------------

#if defined(__x86_64__)
// __builtin_cpu_supports knows "f16c" in newer compilers only. That the system saves the registers is part of "avx2".
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const Kernels* best_kernels() {
#if defined(__x86_64__)
  const char* asked = std::getenv("AAH_CPU_ISA");
  __builtin_cpu_init();
  // A file's compiler may use every extension that the file was compiled for, so each of them is asked for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool want_baseline = asked && !std::strcmp(asked, "baseline"), want_avx2 = asked && !std::strcmp(asked, "avx2");
  if (avx512 && !want_baseline && !want_avx2) return aah_kernels_avx512();
  if (avx2 && !want_baseline) return aah_kernels_avx2();
#endif
  return aah_kernels_baseline();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* chosen = best_kernels();
  return *chosen;
}

// --- memory --------------------------------------------------------------------------------------------------

Buffer allocate(int64_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, static_cast<size_t>(bytes < 64 ? 64 : bytes)) != 0) p = nullptr;
  return Buffer(static_cast<char*>(p));
}

char* thread_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  static thread_local int64_t size = 0;
  if (size < bytes) {
    buffer = allocate(bytes);
    size = buffer ? bytes : 0;
  }
  return buffer.get();
}

namespace {

// Rows of padding: zero (`out` or dq) and a log-sum-exp of the sink logit alone.
void fill_padding(const AahParams& p, const std::vector<Sequence>& sequences, const AahTensor& rows, bool with_lse) {
  const int64_t bytes = p.dtype == AAH_F64 ? 8 : p.dtype == AAH_F32 ? 4 : 2;
  for (const Sequence& s : sequences) {
    int32_t begin, end;
    real_queries(s, &begin, &end);
    for (int32_t q = 0; q < s.q_len; ++q) {
      if (q == begin) q = end;
      if (q >= s.q_len) break;
      for (int64_t h = 0; h < p.q_heads; ++h) {
        const int64_t at = s.q_batch * rows.batch + (static_cast<int64_t>(s.q_offset) + q) * rows.length + h * rows.head;
        std::memset(static_cast<char*>(rows.data) + at * bytes, 0, p.head_dim * bytes);
        if (!with_lse) continue;
        const int64_t l = (s.q_batch * p.q_heads + h) * p.q_len + s.q_offset + q;
        if (p.dtype == AAH_F64) {
          static_cast<double*>(p.lse)[l] = p.sink_logits ? static_cast<const double*>(p.sink_logits)[h] : -INFINITY;
        } else {
          static_cast<float*>(p.lse)[l] = p.sink_logits ? static_cast<const float*>(p.sink_logits)[h] : -INFINITY;
        }
      }
    }
  }
}

struct Run {
  const Call* call;
  const std::vector<Task>* tasks;
  int64_t scratch;
  bool backward;
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
};

// Takes entries until the list is empty. Entries start in list order, so whatever entry an earlier one waits for
// is already running on some thread: tickets cannot deadlock, even when all workers run on one thread.
void work(void* argument, int32_t) {
  Run& run = *static_cast<Run*>(argument);
  char* scratch = thread_scratch(run.scratch);
  if (!scratch) {
    run.out_of_memory = true;  // the tasks are left to the other workers
    return;
  }
  const int64_t n = static_cast<int64_t>(run.tasks->size());
  for (int64_t i = run.next++; i < n; i = run.next++) {
    if (run.backward) {
      kernels().backward(run.call, &(*run.tasks)[i], i, scratch);
    } else {
      kernels().forward(run.call, &(*run.tasks)[i], scratch);
    }
  }
}

bool run_tasks(const AahParams& p, const Call& call, const std::vector<Task>& tasks, const AahThreads* threads,
               bool backward) {
  if (tasks.empty()) return true;
  int32_t lanes = 0;
  int64_t cost = 0;
  for (const Task& t : tasks) {
    lanes = std::max(lanes, t.heads * (t.q_end - t.q_begin));
    cost += t.cost;
  }
  Run run;
  run.call = &call;
  run.tasks = &tasks;
  run.scratch = kernels().scratch_bytes(&p, backward, lanes);
  run.backward = backward;
  int32_t workers = threads ? threads->workers : 1;
  workers = static_cast<int32_t>(std::min<int64_t>(std::max(workers, 1), static_cast<int64_t>(tasks.size())));
  if (cost * p.head_dim < 100000) workers = 1;  // about 10 us: less than waking a thread
  if (workers == 1) {
    work(&run, 0);
  } else {
    threads->run(threads->context, workers, work, &run);
  }
  return run.next >= static_cast<int64_t>(tasks.size());
}

void relax() {
#if defined(__x86_64__)
  for (int i = 0; i < 64; ++i) __builtin_ia32_pause();
#endif
#if defined(__unix__) || defined(__APPLE__)
  sched_yield();  // the thread whose turn it is may need this core
#endif
}

int64_t contiguous_length(const AahParams& p) { return p.kv_heads * p.head_dim; }

bool is_contiguous(const AahParams& p, const AahTensor& t) {
  return t.head == p.head_dim && t.length == contiguous_length(p) && t.batch == p.kv_len * contiguous_length(p);
}

struct Convert {
  const AahParams* params;
  const char *dk, *dv;
  std::atomic<int64_t> next{0};
};

// Accumulated gradients of k and v into the caller's tensors, one (batch, position) at a time.
void convert(void* argument, int32_t) {
  Convert& c = *static_cast<Convert*>(argument);
  const AahParams& p = *c.params;
  const int64_t wide = p.dtype == AAH_F64 ? 8 : 4, bytes = p.dtype == AAH_F64 ? 8 : p.dtype == AAH_F32 ? 4 : 2;
  const int64_t n = p.batch * p.kv_len, chunk = 64;
  for (int64_t first = c.next.fetch_add(chunk); first < n; first = c.next.fetch_add(chunk)) {
    for (int64_t i = first; i < std::min(first + chunk, n); ++i) {
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        const int64_t from = (i * p.kv_heads + h) * p.head_dim * wide;
        const int64_t b = i / p.kv_len, j = i % p.kv_len;
        for (int side = 0; side < 2; ++side) {
          const AahTensor& t = side ? p.dv : p.dk;
          char* to = static_cast<char*>(t.data) + (b * t.batch + j * t.length + h * t.head) * bytes;
          kernels().store_row(&p, (side ? c.dv : c.dk) + from, to, p.head_dim);
        }
      }
    }
  }
}

template <typename C>
void reduce_sinks(const AahParams& p, const std::vector<Task>& tasks, const char* partial) {
  std::vector<double> sums(p.q_heads, 0.0);
  for (size_t i = 0; i < tasks.size(); ++i) sums[tasks[i].head] += reinterpret_cast<const C*>(partial)[i];
  for (int64_t h = 0; h < p.q_heads; ++h) static_cast<C*>(p.d_sink_logits)[h] = static_cast<C>(sums[h]);
}

// A row of padding has log-sum-exp = sink logit, so its gradient passes straight through.
template <typename C>
void add_padding_sinks(const AahParams& p, const std::vector<Sequence>& sequences) {
  if (!p.dlse) return;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    double sum = static_cast<C*>(p.d_sink_logits)[h];
    for (const Sequence& s : sequences) {
      int32_t begin, end;
      real_queries(s, &begin, &end);
      const C* row = static_cast<const C*>(p.dlse) + (s.q_batch * p.q_heads + h) * p.q_len + s.q_offset;
      for (int32_t q = 0; q < s.q_len; ++q) {
        if (q < begin || q >= end) sum += row[q];
      }
    }
    static_cast<C*>(p.d_sink_logits)[h] = static_cast<C>(sum);
  }
}

int forward(const AahParams& p, const AahThreads* threads) {
  std::vector<Sequence> sequences;
  if (int status = find_sequences(p, &sequences)) return status;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  const std::vector<Task> tasks = make_tasks(p, sequences, kernels().queries_per_task(&p, false), false);
  Call call = {};
  call.params = &p;
  call.sequences = sequences.data();
  fill_padding(p, sequences, p.out, true);
  return run_tasks(p, call, tasks, threads, false) ? AAH_OK : AAH_ERROR_MEMORY;
}

int backward(const AahParams& p, const AahThreads* threads) {
  std::vector<Sequence> sequences;
  if (int status = find_sequences(p, &sequences)) return status;
  std::vector<Task> tasks;
  if (p.batch && p.q_len) tasks = make_tasks(p, sequences, kernels().queries_per_task(&p, true), true);
  std::vector<int32_t> turns;
  const std::vector<int32_t> tickets = draw_tickets(p, sequences, &tasks, &turns);

  const int64_t wide = p.dtype == AAH_F64 ? 8 : 4;
  const int64_t numbers = p.batch * p.kv_len * p.kv_heads * p.head_dim;
  // Sums are taken in the caller's tensors where these are of the accumulator type and contiguous.
  const bool in_place = (p.dtype == AAH_F32 || p.dtype == AAH_F64) && is_contiguous(p, p.dk) && is_contiguous(p, p.dv);
  Buffer sums;
  char *dk = static_cast<char*>(p.dk.data), *dv = static_cast<char*>(p.dv.data);
  if (!in_place) {
    sums = allocate(2 * numbers * wide);
    if (!sums) return AAH_ERROR_MEMORY;
    dk = sums.get();
    dv = dk + numbers * wide;
  }
  if (numbers > 0) {
    std::memset(dk, 0, numbers * wide);
    std::memset(dv, 0, numbers * wide);
  }
  Buffer partial;
  if (p.sink_logits) {
    partial = allocate(static_cast<int64_t>(tasks.size()) * wide);
    if (!partial) return AAH_ERROR_MEMORY;
  }

  Call call = {};
  call.params = &p;
  call.sequences = sequences.data();
  call.tickets = tickets.data();
  call.turns = turns.data();
  call.relax = relax;
  call.dk = dk;
  call.dv = dv;
  call.d_sink_partial = partial.get();
  if (p.batch && p.q_len) fill_padding(p, sequences, p.dq, false);
  if (!run_tasks(p, call, tasks, threads, true)) return AAH_ERROR_MEMORY;

  if (!in_place && numbers > 0) {
    Convert c;
    c.params = &p;
    c.dk = dk;
    c.dv = dv;
    const int32_t workers = threads && numbers > 100000 ? std::max(threads->workers, 1) : 1;
    if (workers == 1) {
      convert(&c, 0);
    } else {
      threads->run(threads->context, workers, convert, &c);
    }
  }
  if (p.sink_logits && p.dtype == AAH_F64) {
    reduce_sinks<double>(p, tasks, partial.get());
    add_padding_sinks<double>(p, sequences);
  } else if (p.sink_logits) {
    reduce_sinks<float>(p, tasks, partial.get());
    add_padding_sinks<float>(p, sequences);
  }
  return AAH_OK;
}

// Nothing may throw across the C border.
template <typename F>
int guarded(const AahParams* p, bool backward, F f) {
  if (!p) return AAH_ERROR_SHAPE;
  if (int status = check(*p, backward)) return status;
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return AAH_ERROR_MEMORY;
  }
}

}  // namespace
}  // namespace aah

extern "C" int aah_cpu_fwd(const AahParams* params, const AahThreads* threads) {
  return aah::guarded(params, false, [&] { return aah::forward(*params, threads); });
}

extern "C" int aah_cpu_bwd(const AahParams* params, const AahThreads* threads) {
  return aah::guarded(params, true, [&] { return aah::backward(*params, threads); });
}

extern "C" const char* aah_cpu_isa(void) { return aah::kernels().name; }

extern "C" const char* aah_status_text(int status) {
  switch (status) {
    case AAH_OK: return "ok";
    case AAH_ERROR_VERSION: return "parameters of another library version; rebuild with `aah build --force`";
    case AAH_ERROR_DTYPE: return "dtype must be float32, float64, bfloat16 or float16";
    case AAH_ERROR_SHAPE:
      return "shapes are inconsistent: query heads must be a multiple of KV heads, head_dim a multiple of 8 up to 256, "
             "and start, end and q_start need one number per sequence";
    case AAH_ERROR_WINDOW: return "windows must be at least 1, one per query head";
    case AAH_ERROR_POSITION: return "q_start must be at least 0, start at least -2^30, and q_start + q_len must fit in 31 bits";
    case AAH_ERROR_PACKING:
      return "cu_seqlens must rise from 0 to the number of tokens, and no document may cross a batch row";
    case AAH_ERROR_MEMORY: return "out of memory";
    case AAH_ERROR_SINKS: return "sink tokens must be at least 0 and the limit at least 1";
    case AAH_ERROR_CACHE:
      return "the cache does not fit: offset must rise within its slots, one more number than KV heads; first must be at "
             "least 0, one per row; past must be at least 0 and past + new tokens fit in 31 bits";
    case AAH_ERROR_RETENTION:
      return "a KV head has too few slots: a window of w keys needs sinks + w - 1 of them (or one per token so far), and "
             "slots for sinks cannot be added once others are in use";
    case AAH_ERROR_ALIGNMENT: return "rows of q, k, v and out must start at multiples of 16 bytes on a GPU";
    case AAH_ERROR_CUDA: return "CUDA error";
    case AAH_ERROR_DEVICE: return "the kernels need a GPU of compute capability 8.0 or newer";
  }
  return "unknown error";
}
