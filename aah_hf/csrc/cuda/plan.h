// The work list of the forward kernel: which block of threads does what, longest first. Pure C++, shared by the launcher, the
// emulator and the schedule program.
//
// Block i takes entry i and blocks start in order, so the list is the schedule: no atomics, no persistent kernel. It is made
// from what the host knows (shapes, windows), as if nothing were padding and the queries were the last of the keys; costs
// are guesses, coverage is not: every query there can be is in an entry, and a kernel finds its keys from what the device
// holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "../device/sequence.cuh"

namespace aah {

struct Problem {
  Shape shape;
  int64_t batch, q_len, kv_len, q_heads;
  const int32_t* window;  // [q_heads]
  int32_t sinks, limit;
  bool queries_last;      // the queries are the last of the keys; else the first
  int64_t documents;      // packed documents, or 0; then
  int64_t max_q, max_k;   // the longest one's lengths
  int processors;
};

struct Plan {
  std::vector<Entry> entries, merges;  // of one batch row; all rows are alike
  int64_t partials = 0;                // of one batch row
  double makespan = 0, ideal = 0;  // by the cost model; ideal: unsplit work spread evenly
};

// In units of one visited tile of keys (2 MFLOP for 128 queries, 32 keys and head size 128: about 0.8 us of a Hopper
// multiprocessor at the rate of mma.sync).
constexpr double kBlockCost = 2;    // starting a block, loading Q, waiting for the first keys, storing the output
constexpr double kPartialCost = 1;  // storing a partial output as float, and reading it again
constexpr double kMergeCost = 3;    // the second kernel

// Tiles of keys that the queries [begin, end) visit by the host's knowledge.
inline int32_t expected_tiles(const Problem& p, int32_t window, int64_t begin, int64_t end, int64_t kv_len, int64_t offset) {
  const auto span = [&](int64_t query) {
    return aah_visible(static_cast<int32_t>(offset + query), window, p.sinks, p.limit, 0, INT32_MAX,
                       static_cast<int32_t>(kv_len));
  };
  return tiles_of(hull_of(span(begin), span(end - 1)), p.shape.keys).count();
}

// Time until the last processor is done when each takes the next block as soon as it is free; every entry is `rows` blocks.
inline double simulate(const std::vector<double>& costs, int64_t rows, int processors) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free_at;
  for (int i = 0; i < processors; ++i) free_at.push(0);
  double end = 0;
  for (double cost : costs) {
    for (int64_t i = 0; i < rows; ++i) {
      const double done = free_at.top() + cost;
      free_at.pop();
      free_at.push(done);
      end = std::max(end, done);
    }
  }
  return end;
}

struct Item {
  Entry entry;
  int32_t tiles;
};

// Parts into which an item of so many tiles is split, if none may have more than `most` tiles. Parts of fewer than two tiles
// would cost more than they do.
inline int32_t splits_of(int32_t tiles, double most) {
  if (most <= 0 || tiles <= most) return 1;
  const int32_t parts = static_cast<int32_t>(tiles / std::max(most, 1.0)) + 1;
  return std::max(std::min(std::min(parts, tiles / 2), kMaxSplits), 1);
}

inline double cost_of(int32_t tiles, int32_t splits) { return kBlockCost + tiles + (splits > 1 ? kPartialCost : 0); }

// The items, longest first, split so that no part has more than `most` tiles (0: none is split).
inline Plan arrange(const std::vector<Item>& items, double most, int64_t rows, int processors) {
  std::vector<Item> parts;
  Plan plan;
  for (const Item& item : items) {
    Item part = item;
    part.entry.splits = splits_of(item.tiles, most);
    part.entry.partial = static_cast<int32_t>(plan.partials);
    if (part.entry.splits > 1) {
      plan.partials += part.entry.splits;
      plan.merges.push_back(part.entry);
    }
    for (int32_t i = 0; i < part.entry.splits; ++i) {
      part.entry.split = i;
      part.tiles = static_cast<int32_t>(static_cast<int64_t>(item.tiles) * (i + 1) / part.entry.splits -
                                        static_cast<int64_t>(item.tiles) * i / part.entry.splits);
      parts.push_back(part);
    }
  }
  // stable: equal ones stay neighbours, heads of one group side by side, which then share K and V in the cache
  std::stable_sort(parts.begin(), parts.end(), [](const Item& a, const Item& b) { return a.tiles > b.tiles; });
  std::vector<double> costs;
  for (const Item& part : parts) {
    plan.entries.push_back(part.entry);
    costs.push_back(cost_of(part.tiles, part.entry.splits));
  }
  plan.makespan = simulate(costs, rows, processors) + (plan.merges.empty() ? 0 : kMergeCost);
  return plan;
}

// Batch rows whose work is the same by what the host knows; packed documents have no rows.
inline int64_t batch_rows(const Problem& p) { return p.documents > 0 ? 1 : p.batch; }

// One item per tile and head of a batch row, unsplit.
inline std::vector<Item> items_of(const Problem& p) {
  const int64_t queries = p.shape.queries();
  std::vector<Item> items;
  const auto add = [&](int64_t tile, int64_t head, int32_t tiles) {
    const Entry e = {static_cast<int32_t>(tile), static_cast<int32_t>(head), 0, 1, 0};
    items.push_back({e, tiles});
  };
  std::vector<int32_t> of_head(p.q_heads);
  if (p.documents > 0) {
    // Where documents lie in the slots only the device knows, so all tiles of a head are taken to be the longest one's.
    const int64_t end = std::max<int64_t>(p.max_q, 1), offset = std::max<int64_t>(p.max_k - end, 0);
    for (int64_t h = 0; h < p.q_heads; ++h) {
      of_head[h] = expected_tiles(p, p.window[h], std::max<int64_t>(end - queries, 0), end, p.max_k, offset);
    }
    for (int64_t slot = p.batch * p.q_len / queries + p.documents - 1; slot >= 0; --slot) {
      for (int64_t h = 0; h < p.q_heads; ++h) add(slot, h, of_head[h]);
    }
  } else {
    const int64_t offset = p.queries_last ? std::max<int64_t>(p.kv_len - p.q_len, 0) : 0;
    for (int64_t tile = (p.q_len + queries - 1) / queries - 1; tile >= 0; --tile) {
      const int64_t begin = tile * queries, end = std::min(begin + queries, p.q_len);
      for (int64_t h = 0; h < p.q_heads; ++h) of_head[h] = expected_tiles(p, p.window[h], begin, end, p.kv_len, offset);
      for (int64_t h = 0; h < p.q_heads; ++h) add(tile, h, of_head[h]);
    }
  }
  return items;
}

inline Plan make_plan(const Problem& p) {
  const std::vector<Item> items = items_of(p);
  const int64_t rows = batch_rows(p);
  double work = 0;
  int32_t longest = 0;
  for (const Item& item : items) {
    work += cost_of(item.tiles, 1) * static_cast<double>(rows);
    longest = std::max(longest, item.tiles);
  }
  const double ideal = work / p.processors;
  // No block ends later than the ideal and one block: with that many blocks there is nothing to gain, or to simulate.
  if (cost_of(longest, 1) < 0.04 * ideal) {
    Plan plan = arrange(items, 0, 0, p.processors);
    plan.ideal = ideal;
    plan.makespan = ideal + cost_of(longest, 1);
    return plan;
  }
  Plan best = arrange(items, 0, rows, p.processors);
  // Splitting costs something too, and its results lie in memory: only where the list is clearly uneven without.
  if (best.makespan > 1.04 * ideal && longest > 3) {
    for (double share = 1.2; share > 0.08; share *= 0.9) {
      Plan plan = arrange(items, std::max(share * ideal, 2.0), rows, p.processors);
      if (plan.makespan < 0.99 * best.makespan) best = std::move(plan);
    }
  }
  best.ideal = ideal;
  return best;
}

}  // namespace aah
