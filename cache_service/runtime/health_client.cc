#include "cache_service/runtime/health_client.h"

#include <future>

#include "absl/status/status.h"

namespace heavywater {

// Its length is one byte on the wire up to here.
constexpr size_t kMaxServiceBytes = 127;

std::string HealthClient::Check(const std::string& service) {
  // HealthCheckRequest: field 1, a string. HealthCheckResponse: field 1, an enum.
  std::string request;
  if (!service.empty()) {
    if (service.size() > kMaxServiceBytes) return "INVALID_ARGUMENT";
    request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  }
  grpc::Slice slice(request);
  grpc::ByteBuffer send(&slice, 1);
  grpc::ByteBuffer received;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  std::promise<grpc::Status> done;
  stub_.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &send, &received,
                  [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  if (!status.ok()) {
    return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
  }
  grpc::Slice flat;
  if (!received.TrySingleSlice(&flat).ok() || flat.size() != 2) return "UNPARSABLE";
  return flat.begin()[1] == 1 ? "SERVING" : flat.begin()[1] == 2 ? "NOT_SERVING" : "UNKNOWN";
}

}  // namespace heavywater
