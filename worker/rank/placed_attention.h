// One layer's attention of a step at Positions::kCacheRelative.
#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/rank/active_item.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// Turns the keys of the items that are at cache-relative places, and their queries:
// their `attends` (one for each item that runs, in order) then read turned keys, and the
// result is what attention takes instead of rows.queries. Without such items nothing
// happens, and the result is rows.queries. Valid until the next call.
absl::StatusOr<DeviceSpan<const float>> TurnToPlaces(RankCache& cache, int layer,
                                                     std::span<const ActiveItem> items,
                                                     std::span<AttendItem> attends,
                                                     const AttentionRows& rows);

}  // namespace heavywater
