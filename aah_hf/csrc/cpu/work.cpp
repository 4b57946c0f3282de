// Checks parameters and turns them into sequences, a work list and tickets.
#include "work.h"

#include <algorithm>

#include "../include/aah_check.h"

namespace aah {
namespace {

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

}  // namespace

int check(const AahParams& p, bool backward) {
  if (int status = aah_check_sizes(p, INT32_MAX)) return status;
  if (p.dtype < AAH_F32 || p.dtype > AAH_F16) return AAH_ERROR_DTYPE;
  const bool some = p.batch > 0 && p.q_len > 0;
  if (backward && some && (!p.dout.data || !p.dq.data)) return AAH_ERROR_SHAPE;
  if (backward && p.batch > 0 && p.kv_len > 0 && (!p.dk.data || !p.dv.data)) return AAH_ERROR_SHAPE;
  if (backward && p.sink_logits && !p.d_sink_logits) return AAH_ERROR_SHAPE;
  return AAH_OK;
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

std::vector<Task> make_tasks(const AahParams& p, const std::vector<Sequence>& sequences, int32_t most, bool backward) {
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

}  // namespace aah
