#include "cache_service/runtime/grpc_status.h"

#include <algorithm>
#include <string>

namespace heavywater {
namespace {

// HTTP/2 trailers are limited (8 KiB by default in gRPC); a longer message would
// arrive as an unexplained RESOURCE_EXHAUSTED instead.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().substr(0, kMaxMessageBytes));
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), message);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace heavywater
