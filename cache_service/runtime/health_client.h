// grpc.health.v1 without its generated code (Debian's gRPC ships none): the
// messages have one field each.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace heavywater {

class HealthClient {
 public:
  explicit HealthClient(std::shared_ptr<grpc::Channel> channel) : stub_(std::move(channel)) {}

  // "SERVING", "NOT_SERVING", or the name of the status code that came instead.
  std::string Check(const std::string& service);

 private:
  grpc::GenericStub stub_;
};

}  // namespace heavywater
