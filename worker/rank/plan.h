// A sequence's plan: the same pure function on every rank.
#pragma once

#include "absl/status/status.h"
#include "worker/rank/gains_region.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

// Adds the reduced gains in `buffer` to the scores, selects, and hands over the
// slots of the victims. Policies without scores only select.
absl::Status RunPlan(RankCache& cache, SequenceCache& sequence, const GainsRegion& region,
                     DeviceSpan<int64_t> buffer);

}  // namespace heavywater
