#include "cache_service/base/elsewhere.h"

namespace heavywater {
namespace {

constexpr char kPayload[] = "heavywater/elsewhere";

}  // namespace

absl::Status ElsewhereError(absl::string_view message, const std::string& address) {
  absl::Status status = absl::FailedPreconditionError(message);
  status.SetPayload(kPayload, absl::Cord(address));
  return status;
}

std::optional<std::string> ElsewhereOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace heavywater
