// Answering unary calls of the callback API from plain functions.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <utility>

#include "absl/status/statusor.h"
#include "cache_service/runtime/grpc_status.h"

namespace heavywater {

inline grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

template <typename Response>
grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context,
                                 absl::StatusOr<Response> result, Response* response) {
  if (result.ok()) *response = *std::move(result);
  return Finish(context, result.status());
}

}  // namespace heavywater
