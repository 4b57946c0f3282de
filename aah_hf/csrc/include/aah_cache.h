// The ragged ring cache: which keys does a KV head hold, and where? Positions here are *ranks*, r = position - first
// real token of the row, so padding takes no slots. Host and device code both include this file.
//
// A KV head has `cap` slots: the first `sinks` ranks stay where they are, later ones go round in the `cap - sinks` slots
// behind them. A buffer that has not wrapped is simply linear, so it may grow; one that has wrapped may not.
#pragma once

#include "aah_rule.h"

// Slot of rank r >= 0, or -1 where nothing is kept (a head whose window is 1 keeps its sinks alone).
AAH_HD int64_t aah_slot(int64_t r, int64_t cap, int64_t sinks) {
  if (r < sinks) return r < cap ? r : -1;
  const int64_t ring = cap - sinks;
  return ring > 0 ? sinks + (r - sinks) % ring : -1;
}

// Oldest rank that is held besides the sinks, when ranks 0 .. count - 1 have been written (count itself: none).
AAH_HD int64_t aah_oldest(int64_t count, int64_t cap, int64_t sinks) {
  const int64_t kept = count < sinks ? count : sinks, oldest = count - (cap > sinks ? cap - sinks : 0);
  if (count <= cap) return kept;
  return oldest > kept ? oldest : kept;
}
