#include "cache_service/registry/validate.h"

#include "absl/strings/str_cat.h"

namespace heavywater {

absl::Status CheckInt(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", want ", min, " to ", max));
}

absl::Status CheckText(const char* field, const std::string& value, size_t min_bytes,
                       size_t max_bytes) {
  if (value.size() >= min_bytes && value.size() <= max_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", value.size(), " bytes, want ", min_bytes, " to ", max_bytes));
}

}  // namespace heavywater
