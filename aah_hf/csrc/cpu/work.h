// From parameters to a work list: what the driver needs before any kernel runs. Host only.
#pragma once

#include <vector>

#include "schedule.h"

namespace aah {

// An AahStatus: are sizes, pointers, windows and numbers possible at all?
int check(const AahParams& p, bool backward);

// The batch rows, or the packed documents; an AahStatus.
int find_sequences(const AahParams& p, std::vector<Sequence>* out);

// Queries of a sequence that are real tokens: [begin, end).
void real_queries(const Sequence& s, int32_t* begin, int32_t* end);

// All real queries in tasks of at most `most`, longest task first.
std::vector<Task> make_tasks(const AahParams& p, const std::vector<Sequence>& sequences, int32_t most, bool backward);

// Tickets: the n-th task of the list that visits a tile of a KV head adds to it as the n-th. Sets each task's
// ticket_base and one turn per (sequence, KV head, tile) to 0.
std::vector<int32_t> draw_tickets(const AahParams& p, const std::vector<Sequence>& sequences, std::vector<Task>* tasks,
                                  std::vector<int32_t>* turns);

}  // namespace aah
