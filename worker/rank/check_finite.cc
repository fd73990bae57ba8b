#include "worker/rank/check_finite.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

namespace heavywater {

absl::Status CheckFinite(std::string_view name, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(name), "[", i, "] is ", values[i], ", want a finite number"));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
