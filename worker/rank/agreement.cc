#include "worker/rank/agreement.h"

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

// Codes come from another process: an unknown one is still an error.
absl::StatusCode CodeOf(int64_t value) {
  const bool known = value > 0 && value <= static_cast<int64_t>(absl::StatusCode::kUnauthenticated);
  return known ? static_cast<absl::StatusCode>(value) : absl::StatusCode::kUnknown;
}

}  // namespace

absl::Status Agreement::CheckEqual(int64_t field, int group, const std::string& what) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    const int first = rank / group * group;
    if (Get(field, rank) == Get(field, first)) continue;
    return absl::FailedPreconditionError(absl::StrCat(what, " is ", Get(field, first), " on rank ",
                                                      first, " and ", Get(field, rank), " on rank ",
                                                      rank));
  }
  return absl::OkStatus();
}

absl::Status Agreement::CheckStatus(int64_t field, const absl::Status& own) const {
  if (!own.ok()) return own;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (Get(field, rank) == 0) continue;
    const absl::StatusCode code = CodeOf(Get(field, rank));
    return absl::Status(code,
                        absl::StrCat("rank ", rank, " reports ", absl::StatusCodeToString(code)));
  }
  return absl::OkStatus();
}

bool Agreement::AnySet(int64_t field) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (Get(field, rank) != 0) return true;
  }
  return false;
}

absl::Status Annotate(const absl::Status& status, const std::string& what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

}  // namespace heavywater
