// Attention over a ragged ring cache, and appending to it: checks, lists of keys, chunks, threads. Compiled for the
// baseline instruction set.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "../include/aah_cache.h"
#include "runtime.h"

namespace aah {
namespace {

constexpr int64_t kKeptPartials = 1 << 20;  // bytes that a thread keeps between calls
constexpr int64_t kWorthAThread = 100000;   // multiply-adds, or bytes copied: some 10 us, which waking one costs too

// Keys per chunk: it must not depend on the number of threads. More for many queries, which leave more behind.
int64_t keys_per_chunk(const AahCacheParams& p) { return 256 * ((p.q_heads / p.kv_heads * p.q_len + 15) / 16); }

int64_t element_bytes(int32_t dtype) { return dtype == AAH_F64 ? 8 : dtype == AAH_F32 ? 4 : 2; }

int32_t check_cache(const AahCacheParams& p) {
  if (p.version != AAH_CACHE_PARAMS_VERSION) return AAH_ERROR_VERSION;
  if (p.dtype < AAH_F32 || p.dtype > AAH_F16) return AAH_ERROR_DTYPE;
  for (int64_t n : {p.batch, p.q_len, p.slots, p.kv_heads, p.head_dim}) {
    if (n < 0 || n > INT32_MAX) return AAH_ERROR_SHAPE;
  }
  if (p.kv_heads < 1 || p.head_dim < 8 || p.head_dim % 8 != 0 || p.head_dim > AAH_MAX_HEAD_DIM) return AAH_ERROR_SHAPE;
  if (p.sinks < 0) return AAH_ERROR_SINKS;
  if (p.past < 0 || p.past > INT32_MAX - p.q_len || !p.offset || (p.batch > 0 && !p.first)) return AAH_ERROR_CACHE;
  if (p.offset[0] < 0 || p.offset[p.kv_heads] > p.slots) return AAH_ERROR_CACHE;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    if (p.offset[h] > p.offset[h + 1]) return AAH_ERROR_CACHE;
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.first[b] < 0) return AAH_ERROR_CACHE;
  }
  const bool some = p.batch > 0 && p.q_len > 0;
  if (some && (!p.k.data || !p.v.data)) return AAH_ERROR_SHAPE;
  if (p.batch > 0 && p.slots > 0 && (!p.k_cache.data || !p.v_cache.data)) return AAH_ERROR_SHAPE;
  return AAH_OK;
}

int64_t slots_of(const AahCacheParams& p, int64_t head) { return p.offset[head + 1] - p.offset[head]; }

// Real tokens of a row before the new ones.
int64_t tokens_before(const AahCacheParams& p, int64_t row) { return std::max<int64_t>(p.past - p.first[row], 0); }

// Has the cache kept what the queries of a KV head may see? Keys that are gone would be missed without a sign.
bool has_kept(const AahCacheParams& p, int64_t row, int64_t head) {
  const int64_t cap = slots_of(p, head), group = p.q_heads / p.kv_heads;
  if (tokens_before(p, row) <= cap) return true;
  if (cap < p.sinks) return false;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    if (std::min(p.window[h], p.limit) - 1 > cap - p.sinks) return false;
  }
  return true;
}

int32_t check_decode(const AahCacheParams& p) {
  if (int32_t status = check_cache(p)) return status;
  if (p.q_heads < 1 || p.q_heads > INT32_MAX || p.q_heads % p.kv_heads != 0) return AAH_ERROR_SHAPE;
  if (p.q_heads / p.kv_heads * p.q_len > INT32_MAX) return AAH_ERROR_SHAPE;
  if (p.limit < 1) return AAH_ERROR_SINKS;
  if (!p.window) return AAH_ERROR_WINDOW;
  for (int64_t h = 0; h < p.q_heads; ++h) {
    if (p.window[h] < 1) return AAH_ERROR_WINDOW;
  }
  if (p.batch > 0 && p.q_len > 0 && (!p.q.data || !p.out.data || !p.lse)) return AAH_ERROR_SHAPE;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      if (!has_kept(p, b, h)) return AAH_ERROR_RETENTION;
    }
  }
  return AAH_OK;
}

KeyList list_keys(const AahCacheParams& p, int32_t row, int32_t head) {
  const int64_t bytes = element_bytes(p.dtype), before = tokens_before(p, row), cap = slots_of(p, head);
  KeyList list = {};
  list.batch = row;
  list.kv_head = head;
  list.first = p.first[row];
  list.kept = static_cast<int32_t>(std::min<int64_t>(before, p.sinks));
  list.oldest = static_cast<int32_t>(aah_oldest(before, cap, p.sinks));
  const auto add = [&](const AahTensor& k, const AahTensor& v, int64_t at, int64_t of_head, int64_t count) {
    if (count <= 0) return;
    KeyRun& run = list.runs[list.run_count++];
    run.k = static_cast<const char*>(k.data) + (row * k.batch + at * k.length + of_head * k.head) * bytes;
    run.v = static_cast<const char*>(v.data) + (row * v.batch + at * v.length + of_head * v.head) * bytes;
    run.k_stride = k.length * bytes;
    run.v_stride = v.length * bytes;
    run.index = list.count;
    run.count = static_cast<int32_t>(count);
    list.count += run.count;
  };
  const auto add_slots = [&](int64_t slot, int64_t count) { add(p.k_cache, p.v_cache, p.offset[head] + slot, 0, count); };
  if (list.oldest == list.kept) {
    add_slots(0, before);  // nothing dropped: ranks are slots
  } else {
    add_slots(0, list.kept);
    const int64_t live = before - list.oldest;
    const int64_t slot = live > 0 ? aah_slot(list.oldest, cap, p.sinks) : p.sinks, straight = std::min(live, cap - slot);
    add_slots(slot, straight);
    add_slots(p.sinks, live - straight);
  }
  const int64_t padding = std::min<int64_t>(std::max<int64_t>(p.first[row] - p.past, 0), p.q_len);
  add(p.k, p.v, padding, head, p.q_len - padding);
  return list;
}

void run_workers(const AahThreads* threads, int64_t pieces, int64_t cost, AahBody body, void* argument) {
  int64_t workers = threads ? std::max(threads->workers, 1) : 1;
  workers = cost < kWorthAThread ? 1 : std::min(workers, std::max<int64_t>(pieces, 1));
  if (workers == 1) {
    body(argument, 0);
  } else {
    threads->run(threads->context, static_cast<int32_t>(workers), body, argument);
  }
}

struct DecodeRun {
  const DecodeCall* call;
  int32_t chunks;
  int64_t scratch;
  std::atomic<int32_t>* waiting;  // per list: chunks not yet done
  std::atomic<int32_t> next{0};
};

// Whoever does the last chunk of a list combines them all, in their order: the same bits for every number of threads.
void decode_work(void* argument, int32_t) {
  DecodeRun& run = *static_cast<DecodeRun*>(argument);
  char* scratch = thread_scratch(run.scratch);
  if (!scratch) return;  // the chunks are left to the other workers
  for (int32_t i = run.next++; i < run.chunks; i = run.next++) {
    kernels().decode_chunk(run.call, i, scratch);
    const int32_t list = run.call->chunks[i].list;
    if (run.waiting[list].fetch_sub(1, std::memory_order_acq_rel) == 1) kernels().decode_combine(run.call, list, scratch);
  }
}

int decode(const AahCacheParams& p, const AahThreads* threads) {
  if (int32_t status = check_decode(p)) return status;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  std::vector<KeyList> lists;
  std::vector<Chunk> chunks;
  const int64_t step = keys_per_chunk(p);
  int64_t keys = 0;
  for (int32_t b = 0; b < p.batch; ++b) {
    for (int32_t h = 0; h < p.kv_heads; ++h) {
      KeyList list = list_keys(p, b, h);
      list.chunk_begin = static_cast<int32_t>(chunks.size());
      const int32_t index = static_cast<int32_t>(lists.size());
      int64_t at = 0;
      do {  // a list without keys has a chunk too: its rows are written by combining
        const int64_t end = std::min<int64_t>(at + step, list.count);
        chunks.push_back({index, static_cast<int32_t>(at), static_cast<int32_t>(end)});
        at += step;
      } while (at < list.count);
      list.chunk_end = static_cast<int32_t>(chunks.size());
      keys += list.count;
      lists.push_back(list);
    }
  }
  DecodeCall call = {};
  call.params = &p;
  call.lists = lists.data();
  call.chunks = chunks.data();
  call.partial_bytes = kernels().decode_partial_bytes(&p);
  const int64_t bytes = call.partial_bytes * static_cast<int64_t>(chunks.size());
  static thread_local Buffer kept;
  Buffer fresh;
  Buffer& partials = bytes <= kKeptPartials ? kept : fresh;
  if (!partials) partials = allocate(std::max(bytes, kKeptPartials));
  if (!partials) return AAH_ERROR_MEMORY;
  call.partials = partials.get();

  std::unique_ptr<std::atomic<int32_t>[]> waiting(new std::atomic<int32_t>[lists.size()]);
  for (size_t i = 0; i < lists.size(); ++i) waiting[i] = lists[i].chunk_end - lists[i].chunk_begin;
  DecodeRun run;
  run.call = &call;
  run.chunks = static_cast<int32_t>(chunks.size());
  run.scratch = kernels().decode_scratch_bytes(&p);
  run.waiting = waiting.get();
  run_workers(threads, run.chunks, keys * p.head_dim * (p.q_heads / p.kv_heads) * p.q_len, decode_work, &run);
  return run.next >= run.chunks ? AAH_OK : AAH_ERROR_MEMORY;
}

struct AppendRun {
  const AahCacheParams* params;
  std::atomic<int64_t> next{0};
};

void append_head(const AahCacheParams& p, int64_t row, int64_t head) {
  const int64_t bytes = element_bytes(p.dtype), cap = slots_of(p, head), end = p.past + p.q_len - p.first[row];
  const int64_t padding = std::max<int64_t>(p.first[row] - p.past, 0);
  for (int64_t t = padding; t < p.q_len; ++t) {
    const int64_t rank = p.past + t - p.first[row], slot = aah_slot(rank, cap, p.sinks);
    if (slot < 0 || (rank >= p.sinks && rank < end - (cap - p.sinks))) continue;  // a later one takes its slot
    for (const auto& [from, to] : {std::make_pair(&p.k, &p.k_cache), std::make_pair(&p.v, &p.v_cache)}) {
      const char* source = static_cast<const char*>(from->data);
      char* target = static_cast<char*>(to->data);
      std::memcpy(target + (row * to->batch + (p.offset[head] + slot) * to->length) * bytes,
                  source + (row * from->batch + t * from->length + head * from->head) * bytes, p.head_dim * bytes);
    }
  }
}

void append_work(void* argument, int32_t) {
  AppendRun& run = *static_cast<AppendRun*>(argument);
  const AahCacheParams& p = *run.params;
  for (int64_t i = run.next++; i < p.batch * p.kv_heads; i = run.next++) append_head(p, i / p.kv_heads, i % p.kv_heads);
}

int append(const AahCacheParams& p, const AahThreads* threads) {
  if (int32_t status = check_cache(p)) return status;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const int64_t cap = slots_of(p, h);
      if (cap < p.sinks && p.past + p.q_len - p.first[b] > cap) return AAH_ERROR_RETENTION;
    }
  }
  AppendRun run;
  run.params = &p;
  const int64_t pieces = p.batch * p.kv_heads;
  run_workers(threads, pieces, pieces * p.q_len * p.head_dim * element_bytes(p.dtype), append_work, &run);
  return AAH_OK;
}

template <typename F>
int guarded(const AahCacheParams* p, F f) {
  if (!p) return AAH_ERROR_SHAPE;
  try {
    return f(*p);
  } catch (const std::bad_alloc&) {  // nothing may throw across the C border
    return AAH_ERROR_MEMORY;
  }
}

}  // namespace
}  // namespace aah

extern "C" int aah_cpu_decode(const AahCacheParams* params, const AahThreads* threads) {
  return aah::guarded(params, [&](const AahCacheParams& p) { return aah::decode(p, threads); });
}

extern "C" int aah_cpu_cache_append(const AahCacheParams* params, const AahThreads* threads) {
  return aah::guarded(params, [&](const AahCacheParams& p) { return aah::append(p, threads); });
}
