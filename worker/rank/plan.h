// A sequence's plan: the same pure function on every rank.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/rank/gains_region.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/recall_region.h"

namespace heavywater {

class SequenceCache;

// What all ranks know after the reduce. The regions are offsets into both copies
// of the buffer.
struct PlanInput {
  GainsRegion gains;
  RecallRegion recall;            // of size 0 without recall
  DeviceSpan<int64_t> buffer;     // on the device
  std::span<const int64_t> sums;  // in host memory
  int64_t promotable_end = 0;     // positions below it have a copy on every rank
};

// Adds the reduced gains to the scores, selects, and hands over the slots of the
// victims: to the next tokens, and to demoted positions that have received more.
// Policies without scores only select. `wait_left`: as of Evict(), one for all plans of a step.
absl::Status RunPlan(RankCache& cache, SequenceCache& sequence, const PlanInput& input,
                     absl::Duration& wait_left);

}  // namespace heavywater
