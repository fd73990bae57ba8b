// A line of the log for each call that is made with an admin's token.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>

namespace heavywater {

class Access;

// `access` must outlive the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeAudit(
    const Access& access);

}  // namespace heavywater
