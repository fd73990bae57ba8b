// Certificates and keys as text (PEM), looked into before they are used.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace heavywater {

// What a server or client shows, and what it trusts. Either part may be empty.
struct PemMaterial {
  std::string certificates = {};  // the own one first, then those that signed it
  std::string key = {};           // private, of the first; not encrypted
  std::string roots = {};         // of the others' certificates
  bool operator==(const PemMaterial&) const = default;
};

// Until when the material can be used: the earliest end of a certificate in
// `certificates`; InfiniteFuture() when there is none. INVALID_ARGUMENT, without anything
// of the contents: not PEM, the key is not the certificate's, or it has expired at `now`.
absl::StatusOr<absl::Time> CheckPem(const PemMaterial& material, absl::Time now);

}  // namespace heavywater
