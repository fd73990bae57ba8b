// The policy's options between the API and the core's plain structs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "heavywater/v1/common.pb.h"
#include "worker/policy/policy.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Defaults of the named preset (`unnamed` when the message names none) where a
// field is absent or 0. INVALID_ARGUMENT naming the field for a name or a number
// that cannot be; whether the budget works for a prompt is ResolveBudget()'s to
// say.
absl::StatusOr<PolicyOptions> PolicyFromProto(const v1::PolicyOptions& proto,
                                              const std::string& unnamed = "snapkv_h2o");
// Every field set.
v1::PolicyOptions PolicyToProto(const PolicyOptions& options);
v1::ResolvedBudget BudgetToProto(const PolicyOptions& options, const Budget& budget);

// "stop" or "drop".
absl::StatusOr<OnHostFull> ParseOnHostFull(const std::string& name);

}  // namespace heavywater
