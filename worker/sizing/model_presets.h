// Shapes of models that are often asked for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/model_config.h"

namespace heavywater {

// "llama-3-8b" or "llama-3-70b". INVALID_ARGUMENT lists the names.
absl::StatusOr<ModelConfig> ModelPreset(std::string_view name);

}  // namespace heavywater
