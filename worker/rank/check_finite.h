// Validation at the edge: for engines that bring their own Q, K and V.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/status.h"

namespace heavywater {

// INVALID_ARGUMENT naming `name`, the first index that is NaN or infinite, and
// what is there. One pass.
absl::Status CheckFinite(std::string_view name, std::span<const float> values);

}  // namespace heavywater
