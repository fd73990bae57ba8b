// Whether two ranks may be in one group.
#pragma once

#include "absl/status/status.h"
#include "heavywater/v1/group.pb.h"

namespace heavywater {

// FAILED_PRECONDITION naming what differs (size, fingerprint, configuration) and
// the values of both ranks.
absl::Status CheckAgreement(const v1::JoinRequest& a, const v1::JoinRequest& b);

}  // namespace heavywater
