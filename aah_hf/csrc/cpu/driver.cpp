// Checks parameters, cuts the work into a list sorted longest first, and runs it on the caller's threads. Compiled
// for the baseline instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#include "schedule.h"

namespace aah {
namespace {

// --- instruction set -----------------------------------------------------------------------------------------

const Kernels* best_kernels() {
#if defined(__x86_64__)
  const char* asked = std::getenv("AAH_CPU_ISA");
  const bool baseline = asked && !std::strcmp(asked, "baseline"), avx2 = asked && !std::strcmp(asked, "avx2");
  __builtin_cpu_init();
  // the compiler may use every extension that the file was compiled for, so each of them is asked for
  if (!baseline && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return aah_kernels_avx512();
  }
  if (!baseline && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return aah_kernels_avx2();
  }
#endif
  return aah_kernels_baseline();
}

const Kernels& kernels() {
  static const Kernels* chosen = best_kernels();
  return *chosen;
}

// --- memory --------------------------------------------------------------------------------------------------

struct Free {
  void operator()(void* p) const { std::free(p); }
};
typedef std::unique_ptr<char, Free> Buffer;

// Cache-line aligned; empty on failure.
Buffer allocate(int64_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, static_cast<size_t>(bytes < 64 ? 64 : bytes)) != 0) p = nullptr;
  return Buffer(static_cast<char*>(p));
}

// A thread keeps its scratch between calls: fresh pages would cost a page fault per 4 KiB in every call.
char* thread_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  static thread_local int64_t size = 0;
  if (size < bytes) {
    buffer = allocate(bytes);
    size = buffer ? bytes : 0;
  }
  return buffer.get();
}

// --- validation and sequences --------------------------------------------------------------------------------

int check(const AahParams& p, bool backward) {
  if (p.version != AAH_PARAMS_VERSION) return AAH_ERROR_VERSION;
  if (p.dtype < AAH_F32 || p.dtype > AAH_F16) return AAH_ERROR_DTYPE;
  const int64_t most = INT32_MAX;
  for (int64_t n : {p.batch, p.q_len, p.kv_len, p.q_heads, p.kv_heads, p.head_dim, p.sequences}) {
    if (n < 0 || n > most) return AAH_ERROR_SHAPE;
  }
  if (p.kv_heads < 1 || p.q_heads < 1 || p.q_heads % p.kv_heads != 0) return AAH_ERROR_SHAPE;
  if (p.head_dim < 8 || p.head_dim % 8 != 0 || p.head_dim > AAH_MAX_HEAD_DIM) return AAH_ERROR_SHAPE;
  if (p.sinks < 0 || p.limit < 1) return AAH_ERROR_SINKS;
  if (!p.window) return AAH_ERROR_WINDOW;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    if (p.window[h] < 1) return AAH_ERROR_WINDOW;
  }
  if ((p.cu_q == nullptr) != (p.cu_k == nullptr)) return AAH_ERROR_PACKING;
  if (!p.cu_q && p.sequences != p.batch) return AAH_ERROR_SHAPE;
  if (p.cu_q && (p.batch * p.q_len > most || p.batch * p.kv_len > most)) return AAH_ERROR_SHAPE;
  const bool some = p.batch > 0 && p.q_len > 0;
  if (some && (!p.q.data || !p.out.data || !p.lse)) return AAH_ERROR_SHAPE;
  if (some && p.kv_len > 0 && (!p.k.data || !p.v.data)) return AAH_ERROR_SHAPE;
  if (backward && some && (!p.dout.data || !p.dq.data)) return AAH_ERROR_SHAPE;
  if (backward && p.batch > 0 && p.kv_len > 0 && (!p.dk.data || !p.dv.data)) return AAH_ERROR_SHAPE;
  if (backward && p.sink_logits && !p.d_sink_logits) return AAH_ERROR_SHAPE;
  return AAH_OK;
}

// One side (queries or keys) of a packed document: in which batch row, from where, how long.
bool locate(const int32_t* cu, int64_t i, int64_t length, int32_t* row, int32_t* offset, int32_t* count) {
  *count = cu[i + 1] - cu[i];
  *row = *offset = 0;
  if (*count == 0) return true;
  *row = static_cast<int32_t>(cu[i] / length);
  *offset = static_cast<int32_t>(cu[i] % length);
  return *offset + static_cast<int64_t>(*count) <= length;
}

bool covers(const int32_t* cu, int64_t n, int64_t total) {
  if (cu[0] != 0 || cu[n] != total) return false;
  for (int64_t i = 0; i < n; ++i) {
    if (cu[i] > cu[i + 1]) return false;
  }
  return true;
}

int find_sequences(const AahParams& p, std::vector<Sequence>* out) {
  if (p.cu_q && (!covers(p.cu_q, p.sequences, p.batch * p.q_len) || !covers(p.cu_k, p.sequences, p.batch * p.kv_len))) {
    return AAH_ERROR_PACKING;
  }
  const int64_t tiles_of_row = (p.kv_len + kTile - 1) / kTile;
  int64_t turns = 0;
  out->resize(p.sequences);
  for (int64_t i = 0; i < p.sequences; ++i) {
    Sequence& s = (*out)[i];
    const int32_t row = static_cast<int32_t>(i);
    s = {row, 0, static_cast<int32_t>(p.q_len), row, 0, static_cast<int32_t>(p.kv_len), 0, 0, AAH_UNLIMITED, turns};
    if (p.cu_q) {
      if (!locate(p.cu_q, i, p.q_len, &s.q_batch, &s.q_offset, &s.q_len)) return AAH_ERROR_PACKING;
      if (!locate(p.cu_k, i, p.kv_len, &s.k_batch, &s.k_offset, &s.kv_len)) return AAH_ERROR_PACKING;
    }
    if (p.q_start) s.q_start = p.q_start[i];
    if (p.start) s.start = p.start[i];
    if (p.end) s.stop = p.end[i];
    if (s.q_start < 0 || s.start < INT32_MIN / 2) return AAH_ERROR_POSITION;
    if (static_cast<int64_t>(s.q_start) + s.q_len > INT32_MAX) return AAH_ERROR_POSITION;
    turns += p.kv_heads * (p.cu_q ? (s.kv_len + kTile - 1) / kTile : tiles_of_row);
  }
  return AAH_OK;
}

// Queries of a sequence that are real tokens: [begin, end).
void real_queries(const Sequence& s, int32_t* begin, int32_t* end) {
  const int64_t low = std::max<int64_t>(static_cast<int64_t>(s.start) - s.q_start, 0);
  const int64_t high = std::min<int64_t>(static_cast<int64_t>(s.stop) - s.q_start, s.q_len);
  *begin = static_cast<int32_t>(std::min<int64_t>(low, s.q_len));
  *end = static_cast<int32_t>(std::max<int64_t>(high, *begin));
}

// --- work list -----------------------------------------------------------------------------------------------

// Tiles that a task visits and their number as its cost. All four bounds of aah_visible grow with the position, so
// the first and the last query of each head tell the hull.
void plan_tiles(const AahParams& p, const Sequence& s, Task* t) {
  int32_t sink_begin = AAH_UNLIMITED, sink_end = 0, begin = AAH_UNLIMITED, end = 0;
  int64_t keys = 0;
  for (int32_t h = t->head; h < t->head + t->heads; ++h) {
    const AahSpan a = aah_visible(s.q_start + t->q_begin, p.window[h], p.sinks, p.limit, s.start, s.stop, s.kv_len);
    const AahSpan b = aah_visible(s.q_start + t->q_end - 1, p.window[h], p.sinks, p.limit, s.start, s.stop, s.kv_len);
    if (a.begin < b.end) {
      begin = std::min(begin, a.begin);
      end = std::max(end, b.end);
    }
    if (a.sink_begin < b.sink_end) {
      sink_begin = std::min(sink_begin, a.sink_begin);
      sink_end = std::max(sink_end, b.sink_end);
    }
    keys = std::max<int64_t>(keys, (a.end - a.begin + b.end - b.begin) / 2 + b.sink_end - b.sink_begin);
  }
  t->sink_tile = t->sink_tile_end = t->band_tile = t->band_tile_end = 0;
  if (begin < end) {
    t->band_tile = begin / kTile;
    t->band_tile_end = (end + kTile - 1) / kTile;
  }
  if (sink_begin < sink_end) {
    const int32_t stop = begin < end ? std::min((sink_end + kTile - 1) / kTile, t->band_tile) : (sink_end + kTile - 1) / kTile;
    t->sink_tile = sink_begin / kTile;
    t->sink_tile_end = std::max(stop, t->sink_tile);
  }
  t->cost = (keys + 16) * (t->q_end - t->q_begin) * t->heads;  // 16: transposing Q and the output
}

std::vector<Task> make_tasks(const AahParams& p, const std::vector<Sequence>& sequences, bool backward) {
  const int32_t most = kernels().queries_per_task(&p, backward);
  const int32_t group = static_cast<int32_t>(p.q_heads / p.kv_heads);
  std::vector<Task> tasks;
  for (size_t i = 0; i < sequences.size(); ++i) {
    int32_t q_begin, q_end;
    real_queries(sequences[i], &q_begin, &q_end);
    const int32_t n = q_end - q_begin;
    if (n <= 0) continue;
    // Few queries (decoding): the heads of a group share vectors, whose lanes would be empty otherwise.
    const int32_t heads = !backward && n * static_cast<int64_t>(group) <= most && n <= 16 ? group : 1;
    const int32_t pieces = (n * heads + most - 1) / most;
    for (int32_t h = 0; h < p.q_heads; h += heads) {
      for (int32_t q = q_begin; q < q_end; q += pieces == 1 ? n : most) {
        Task t = {};
        t.sequence = static_cast<int32_t>(i);
        t.head = h;
        t.heads = heads;
        t.kv_head = h / group;
        t.q_begin = q;
        t.q_end = pieces == 1 ? q_end : std::min(q + most, q_end);
        plan_tiles(p, sequences[i], &t);
        tasks.push_back(t);
      }
    }
  }
  // Longest first: the short tasks at the end fill the gaps. Stable, hence the same list everywhere.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return tasks;
}

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

// Tickets: the n-th task of the list that visits a tile of a KV head adds to it as the n-th.
std::vector<int32_t> draw_tickets(const AahParams& p, const std::vector<Sequence>& sequences, std::vector<Task>* tasks,
                                  std::vector<int32_t>* turns) {
  int64_t total = 0;
  for (const Sequence& s : sequences) total = std::max(total, s.turn_base + p.kv_heads * ((s.kv_len + kTile - 1) / kTile));
  std::vector<int32_t> drawn(total, 0), tickets;
  for (Task& t : *tasks) {
    const Sequence& s = sequences[t.sequence];
    int32_t* of_head = drawn.data() + s.turn_base + static_cast<int64_t>(t.kv_head) * ((s.kv_len + kTile - 1) / kTile);
    t.ticket_base = static_cast<int64_t>(tickets.size());
    for (int32_t i = t.sink_tile; i < t.sink_tile_end; ++i) tickets.push_back(of_head[i]++);
    for (int32_t i = t.band_tile; i < t.band_tile_end; ++i) tickets.push_back(of_head[i]++);
  }
  turns->assign(total, 0);
  return tickets;
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
  const std::vector<Task> tasks = make_tasks(p, sequences, false);
  Call call = {};
  call.params = &p;
  call.sequences = sequences.data();
  fill_padding(p, sequences, p.out, true);
  return run_tasks(p, call, tasks, threads, false) ? AAH_OK : AAH_ERROR_MEMORY;
}

int backward(const AahParams& p, const AahThreads* threads) {
  std::vector<Sequence> sequences;
  if (int status = find_sequences(p, &sequences)) return status;
  std::vector<Task> tasks = p.batch && p.q_len ? make_tasks(p, sequences, true) : std::vector<Task>();
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
  }
  return "unknown error";
}
