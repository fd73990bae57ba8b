// The pick as its formula reads (backend.h), scalar, in double.
#pragma once

#include <span>
#include <vector>

#include "cache_service/base/ids.h"
#include "worker/backend/recall.h"

namespace heavywater {

// One token's queries of one KV head over the demoted positions.
struct PickQuery {
  const RecallView& recall;
  int num_sets = 1;
  int kv_head = 0;
  std::vector<const float*> queries;  // of the group's heads, [head_dim] each
  std::vector<double> lse;            // of the slots' exact logits, per head
  float scale = 0;
};

// Every demoted position that has a copy, or whose page rests, ascending.
std::vector<Position> DemotedPositions(const RecallView& recall, int num_sets, int kv_head);

// [position][head] logits from the sketch.
std::vector<std::vector<double>> EstimateLogits(const PickQuery& pick,
                                                std::span<const Position> positions);

// Ascending. A query that sees no slot (its lse is -infinity) picks nothing,
// except in mode `all`: there is nothing to compare with. `missed`: how many picks fell on
// pages that rest, and were taken out.
std::vector<Position> PickPositions(const PickQuery& pick, int64_t* missed);

// The share that unpicked demoted positions would have had: U / (P + U), mean over
// the heads, with U their estimated mass and P the exact mass of slots and picks.
// `attended` is the log-sum-exp of slots and picks, per head.
double MissingShare(const PickQuery& pick, std::span<const Position> picks,
                    std::span<const double> attended);

}  // namespace heavywater
