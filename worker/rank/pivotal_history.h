// Scissorhands' history window: how often each resident was pivotal for the newest
// queries.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "worker/backend/backend.h"
#include "worker/rank/gains_region.h"

namespace heavywater {

class RankCache;
class SequenceCache;

// A score is the sum of the position's counts over the newest plans that together have
// at least `window` queries (all plans, while they have fewer), and of its count at the
// prompt's end, which is not known query by query and fades linearly: of it (window - n)
// / window is left after n queries. Integers of every rank alike, so ranks cannot
// disagree.
//
// In host memory: 4 bytes a plan of the window for each resident of a set, some 100
// bytes with the preset's 25 plans. A plan copies the counts of all slots to the host and
// the scores back.
class PivotalHistory {
 public:
  // Of `num_blocks` with `num_sets` each (BlockLayout).
  PivotalHistory(int num_blocks, int num_sets, int64_t window)
      : num_sets_(num_sets), window_(window), rows_(int64_t{num_blocks} * num_sets) {}

  // A plan: the counts since the last one (`region` of `buffer`, reduced) into the
  // history, and the device's scores from it. Before victims go.
  absl::Status AddCounts(RankCache& cache, SequenceCache& sequence, const GainsRegion& region,
                         DeviceSpan<int64_t> buffer);

  // Of one set: `counts` [positions] of the newest plan, 2^32 each; `scores` in: the
  // scores of positions that are new here, out: everybody's. kNoPosition: left alone.
  // After BeginPlan(), each set once.
  void BeginPlan(int64_t queries);
  void AddSet(int block, int set, std::span<const Position> positions,
              std::span<const int64_t> counts, std::span<int64_t> scores);

 private:
  struct Row {
    int64_t at_prompt = 0;        // score when the prompt ended; 0 for later positions
    std::deque<uint32_t> counts;  // of the newest plans, oldest first
  };
  using Rows = absl::flat_hash_map<Position, Row>;

  int64_t ScoreOf(const Row& row) const;

  const int num_sets_;
  const int64_t window_;
  std::deque<int64_t> plans_;  // queries of each plan in the window, oldest first
  int64_t plan_queries_ = 0;   // their sum
  int64_t queries_ = 0;        // since the prompt
  std::vector<Rows> rows_;     // [num_blocks][num_sets]
};

}  // namespace heavywater
