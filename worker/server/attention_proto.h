// AttentionService's messages and the engine's plain structs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "heavywater/v1/attention.pb.h"
#include "worker/rank/attention_engine.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// INVALID_ARGUMENT naming the field for what no step can be.
absl::StatusOr<std::vector<EngineItem>> EngineItemsFromProto(const v1::BeginStep& begin);

// Every field set but on_host_full. INVALID_ARGUMENT naming the field.
absl::StatusOr<SequenceOptions> SequenceFromProto(const v1::OpenAttention& open,
                                                  const std::string& default_policy);

// `bytes` as float32. INVALID_ARGUMENT naming `field` when they are no whole numbers.
absl::StatusOr<std::vector<float>> FloatsFromBytes(const char* field, const std::string& bytes);

void FillError(const absl::Status& status, v1::AttentionError& error);
void AddItemStatus(const absl::Status& status,
                   google::protobuf::RepeatedPtrField<v1::ItemStatus>& items);

// Counts, sets (in messages of a bounded size) and picks.
std::vector<v1::KeptResponse> KeptToProto(const KeptSequence& kept, const SequenceStats& stats,
                                          bool recall);

}  // namespace heavywater
