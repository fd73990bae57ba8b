#include "cache_service/base/shortage.h"

#include <algorithm>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace heavywater {
namespace {

constexpr char kPayload[] = "heavywater/shortage";
constexpr int64_t kNever = -1;

}  // namespace

absl::Status ExhaustedError(absl::string_view message, const Shortage& shortage) {
  const bool retry = shortage.retry_after != absl::InfiniteDuration();
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kPayload, absl::Cord(absl::StrCat(
                                  shortage.need, " ", shortage.available, " ", shortage.limit, " ",
                                  retry ? absl::ToInt64Milliseconds(shortage.retry_after) : kNever,
                                  " ", shortage.subject)));
  return status;
}

std::optional<Shortage> ShortageOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 4));
  Shortage shortage;
  int64_t retry_ms = kNever;
  if (parts.size() != 5 || !absl::SimpleAtoi(parts[0], &shortage.need) ||
      !absl::SimpleAtoi(parts[1], &shortage.available) ||
      !absl::SimpleAtoi(parts[2], &shortage.limit) || !absl::SimpleAtoi(parts[3], &retry_ms)) {
    return std::nullopt;
  }
  if (retry_ms != kNever) shortage.retry_after = absl::Milliseconds(retry_ms);
  shortage.subject = parts[4];
  return shortage;
}

}  // namespace heavywater
