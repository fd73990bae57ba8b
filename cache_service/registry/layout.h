// Fingerprints: what pages of a sequence look like, and whether two agree.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/page_geometry.h"
#include "heavywater/v1/common.pb.h"

namespace heavywater {

// The only page layout there is so far.
inline constexpr int kPageFormatVersion = 1;

// INVALID_ARGUMENT naming the field.
absl::StatusOr<PageGeometry> GeometryOf(const v1::Fingerprint& fingerprint);

// Its short name: equal for equal fields, in every process.
FingerprintId FingerprintIdOf(const v1::Fingerprint& fingerprint);

// FAILED_PRECONDITION naming the first field that differs and both values, which
// are called `left` and `right` in the message ("rank 1 has", "the sequence has").
absl::Status CompareFingerprints(const v1::Fingerprint& a, const std::string& left,
                                 const v1::Fingerprint& b, const std::string& right);

}  // namespace heavywater
