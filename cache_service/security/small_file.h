// Files of configuration: certificates, keys, tokens.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace heavywater {

// The whole text. INVALID_ARGUMENT naming the path when it cannot be read, or has more
// than 1 MiB.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace heavywater
