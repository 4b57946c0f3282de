// Where a work entry lies: its sequence, its queries, and the tiles of keys that they visit.
#pragma once

#include "arguments.h"

namespace aah {

AAH_HD int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
AAH_HD int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
AAH_HD int32_t clamped(int32_t x, int32_t low, int32_t high) { return smaller(larger(x, low), high); }

// No tile has more queries: positions q_start ... q_start + q_len + kMaxTile are int32.
constexpr int32_t kMaxTile = 256;

// A batch row or a packed document, as in aah_params.h.
struct Sequence {
  int32_t q_batch, q_offset, q_len;
  int32_t k_batch, k_offset, kv_len;
  int32_t q_start, start, stop;
};

// Tokens cu[i] ... cu[i + 1] - 1 of the flattened [batch * length] tokens, inside one row whatever cu holds.
AAH_HD void document(const int32_t* cu, int32_t i, int32_t batch, int32_t length, int32_t* row, int32_t* offset,
                     int32_t* count) {
  const int32_t first = clamped(cu[i], 0, batch * length);
  *row = *offset = *count = 0;
  if (first >= batch * length) return;
  *row = first / length;
  *offset = first - *row * length;
  *count = clamped(clamped(cu[i + 1], 0, batch * length) - first, 0, length - *offset);
}

AAH_HD Sequence sequence_of(const ForwardArguments& a, int32_t i) {
  Sequence s = {i, 0, a.q_len, i, 0, a.kv_len, 0, 0, INT32_MAX};
  if (a.cu_q) {
    document(a.cu_q, i, a.batch, a.q_len, &s.q_batch, &s.q_offset, &s.q_len);
    document(a.cu_k, i, a.batch, a.kv_len, &s.k_batch, &s.k_offset, &s.kv_len);
  }
  if (a.q_start) s.q_start = clamped(a.q_start[i], 0, INT32_MAX - kMaxTile - s.q_len);
  if (a.start) s.start = larger(a.start[i], INT32_MIN / 2);
  if (a.end) s.stop = a.end[i];
  return s;
}

// The sequence of an entry and the first query of its tile; false where the entry lies beyond the queries there are,
// since the host does not know the documents' lengths.
//
// Packed: document d's tiles take the slots cu_q[d] / queries + d, + 1, ... These first slots ascend, and never reach the
// next document's, as ceil(n / t) + floor(x / t) <= floor((x + n) / t) + 1. So total / queries + documents slots
// hold all tiles, whatever the lengths, and a search finds a slot's document.
AAH_HD bool locate(const ForwardArguments& a, const Entry& e, int32_t row, int32_t tile_queries, Sequence* s,
                   int32_t* q_begin) {
  int32_t i = row, tile = e.tile;
  if (a.cu_q) {
    int32_t low = 0, high = a.sequences;  // the last document whose first slot is not beyond e.tile
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      if (a.cu_q[middle] / tile_queries + middle <= e.tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    i = low;
    tile = e.tile - (a.cu_q[i] / tile_queries + i);
  }
  *s = sequence_of(a, i);
  if (tile < 0 || tile > s->q_len / tile_queries) return false;
  *q_begin = tile * tile_queries;
  return *q_begin < s->q_len;
}

// Queries of [begin, end) that are real tokens; nothing is in q_begin >= q_end.
struct Queries {
  int32_t begin, end;
};
AAH_HD Queries real_queries(const Sequence& s, int32_t begin, int32_t end) {
  const int64_t low = static_cast<int64_t>(s.start) - s.q_start, high = static_cast<int64_t>(s.stop) - s.q_start;
  return {low > begin ? static_cast<int32_t>(low < end ? low : end) : begin,
          high < end ? static_cast<int32_t>(high > begin ? high : begin) : end};
}

// Keys that some of a run of queries see ([sink_begin, sink_end) and [begin, end)), and those that all of them see
// ([all_begin, all_end)). All bounds of aah_visible grow with the position, so the first and the last query tell.
struct Hull {
  int32_t sink_begin, sink_end, begin, end, all_begin, all_end;
};

AAH_HD Hull hull_of(AahSpan first, AahSpan last) {
  Hull h = {first.sink_begin, last.sink_end, first.begin, last.end, last.begin, first.end};
  if (h.begin > h.end) h.begin = h.end;
  if (h.sink_end > h.begin && h.begin < h.end) h.sink_end = h.begin;  // keys above are in the band already
  if (h.sink_begin >= h.sink_end) h.sink_begin = h.sink_end = 0;
  return h;
}

AAH_HD bool overlaps(const Hull& h, int32_t low, int32_t high) {
  return (h.begin < high && h.end > low && h.begin < h.end) ||
         (h.sink_begin < high && h.sink_end > low && h.sink_begin < h.sink_end);
}

// Tiles at fixed positions [i * keys, (i + 1) * keys): those with sinks, then those of the band.
struct Tiles {
  int32_t sink, sinks, band, bands;
  AAH_CONSTEXPR int32_t count() const { return sinks + bands; }
  AAH_CONSTEXPR int32_t at(int32_t i) const { return i < sinks ? sink + i : band + i - sinks; }
};

AAH_HD Tiles tiles_of(const Hull& h, int32_t keys) {
  Tiles t = {0, 0, 0, 0};
  if (h.begin < h.end) {
    t.band = h.begin / keys;
    t.bands = (h.end - 1) / keys + 1 - t.band;
  }
  if (h.sink_begin < h.sink_end) {
    t.sink = h.sink_begin / keys;
    const int32_t stop = (h.sink_end - 1) / keys + 1;
    t.sinks = larger((t.bands > 0 ? smaller(stop, t.band) : stop) - t.sink, 0);
  }
  return t;
}

}  // namespace aah
