// The one function that chooses what a set keeps. This host version is the
// oracle of Backend::Select.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_service/base/ids.h"

namespace heavywater {

// What selection sees of one layer and one set of heads. Views only: the caller
// keeps the memory alive during the call. Any order of positions; free slots
// (kNoPosition) are never kept.
struct Candidates {
  std::span<const Position> positions;  // [num_candidates]
  std::span<const int64_t> scores;      // [num_candidates] attention mass, 2^-32
                                        // fixed point, summed over heads and ranks
};

struct SelectionParams {
  int64_t budget_tokens = 0;  // how many stay
  int64_t sink_tokens = 0;    // positions below this are never candidates for eviction
  int64_t recent_tokens = 1;  // the last positions before tokens_seen, likewise
  int64_t tokens_seen = 0;
};

// Chooses what stays: protected positions (by exclusion, not by a large score)
// and the highest scores of the rest, ties to the lower position. Pure: every
// rank that sees the same input returns the same set. Returns ascending
// indices into `candidates`. When no more than budget_tokens are there, all stay.
std::vector<int32_t> SelectKept(const Candidates& candidates, const SelectionParams& params);

}  // namespace heavywater
