// Checks at the edge: INVALID_ARGUMENT naming field, got and wanted.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace heavywater {

absl::Status CheckInt(const char* field, int64_t value, int64_t min, int64_t max);
absl::Status CheckText(const char* field, const std::string& value, size_t min_bytes,
                       size_t max_bytes);

}  // namespace heavywater
