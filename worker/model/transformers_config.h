// A Transformers folder's config.json as a ModelConfig.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "worker/model/model_config.h"

namespace heavywater {

// UNIMPLEMENTED for an architecture, RoPE scaling, activation or quantisation that is not
// known, naming the field, the value and what is; INVALID_ARGUMENT or NOT_FOUND naming the
// field for values that cannot be. `has_output`: whether there is a matrix for the logits.
absl::StatusOr<ModelConfig> ParseTransformersConfig(const nlohmann::json& json, bool has_output);

}  // namespace heavywater
