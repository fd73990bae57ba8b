// Sets for people and tools: what a committed plan says about each layer.
#pragma once

#include <vector>

#include "cache_service/registry/plan_state.h"
#include "heavywater/v1/sequence.pb.h"

namespace heavywater {

// One message for each set of the plan, ascending by layer and KV head; only the
// given layers, where there are any. Resident positions are split into sinks
// (below budget.sink_tokens), recent (the last budget.recent_tokens seen) and
// heavy (the rest); what is seen and neither resident nor dropped is demoted.
std::vector<v1::SequenceSet> SplitSets(const ReportedPlan& plan, const v1::ResolvedBudget& budget,
                                       const google::protobuf::RepeatedField<int32_t>& layers);

// Means over all sets.
v1::SequenceCounts CountSets(const ReportedPlan& plan);

}  // namespace heavywater
