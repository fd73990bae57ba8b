// FAILED_PRECONDITION of what another cache service has, and where that is.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace heavywater {

absl::Status ElsewhereError(absl::string_view message, const std::string& address);

// None: the status is another one.
std::optional<std::string> ElsewhereOf(const absl::Status& status);

}  // namespace heavywater
