// Reports that exceed a message, in parts.
#pragma once

#include <cstddef>
#include <vector>

#include "heavywater/v1/group.pb.h"

namespace heavywater {

// The report, or reports of the same plan that together say the same, each of
// about `max_bytes` at most (1 MiB or more), in the order in which to send them.
std::vector<v1::PlanReport> SplitReport(const v1::PlanReport& report, size_t max_bytes);

}  // namespace heavywater
