#include "cache_service/registry/join_agreement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"

namespace heavywater {
namespace {

// Digests are long texts: show where they part.
std::string From(const std::string& text, size_t difference) {
  constexpr size_t kBefore = 40;
  constexpr size_t kShown = 120;
  const size_t begin = difference > kBefore ? difference - kBefore : 0;
  return absl::StrCat("\"", begin > 0 ? "..." : "", text.substr(begin, kShown), "\"");
}

}  // namespace

absl::Status CheckAgreement(const v1::JoinRequest& a, const v1::JoinRequest& b) {
  const std::string left = absl::StrCat("rank ", a.rank(), " has");
  const std::string right = absl::StrCat("rank ", b.rank(), " has");
  if (a.size() != b.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("size: ", left, " ", a.size(), ", ", right, " ", b.size()));
  }
  HW_RETURN_IF_ERROR(CompareFingerprints(a.fingerprint(), left, b.fingerprint(), right));
  const std::string& digest_a = a.config_digest();
  const std::string& digest_b = b.config_digest();
  if (digest_a == digest_b) return absl::OkStatus();
  const auto parts =
      std::mismatch(digest_a.begin(), digest_a.end(), digest_b.begin(), digest_b.end());
  const size_t difference = parts.first - digest_a.begin();
  return absl::FailedPreconditionError(absl::StrCat("config_digest: ", left, " ",
                                                    From(digest_a, difference), ", ", right, " ",
                                                    From(digest_b, difference)));
}

}  // namespace heavywater
