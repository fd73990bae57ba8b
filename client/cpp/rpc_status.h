// gRPC's status as Abseil's; the client's only conversion.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace heavywater {

// Both number their codes alike, by design of both.
inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace heavywater
