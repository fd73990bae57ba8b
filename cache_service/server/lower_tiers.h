// The tiers below host memory that a configuration names.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "cache_service/server/durable_state.h"
#include "cache_service/tier/lower_tier.h"
#include "heavywater/v1/config.pb.h"

namespace heavywater {

// The faster first. INVALID_ARGUMENT naming the field when this build lacks the tier.
// A disk that cannot be opened is an error; a Redis may be away, now and later.
absl::StatusOr<std::vector<std::unique_ptr<LowerTier>>> OpenLowerTiers(
    const v1::CacheConfig& config, const DurableState& state, Clock& clock);

}  // namespace heavywater
