// SnapKV's pooling of votes over neighbouring positions, exact in integers.
#pragma once

#include <cstdint>
#include <span>

#include "worker/policy/policy.h"

namespace heavywater {

// to[i] = pool over votes[i - kernel/2 .. i + kernel/2], 0 outside. kAverage
// yields the sum, kNone the vote itself. `to` has votes.size() elements.
void PoolRow(std::span<const int64_t> votes, Pooling pooling, int kernel, int64_t* to);

}  // namespace heavywater
