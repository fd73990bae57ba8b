// The answer of heavywater-plan-memory.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "worker/sizing/plan_request.h"

namespace heavywater {

// {"model": {...}, "rows": [...]}: one row for each world size, context and policy,
// in this order. Bytes are of one device (the fullest) unless the name says
// otherwise; what was not asked is null. INVALID_ARGUMENT naming the field.
absl::StatusOr<nlohmann::ordered_json> AnswerPlanRequest(const PlanRequest& request,
                                                         const ScratchSizes& scratch_sizes);

}  // namespace heavywater
