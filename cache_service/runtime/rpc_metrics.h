// Counts and times every RPC of a server:
//   heavywater_rpcs_total{method, code}, heavywater_rpc_seconds{method}.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace prometheus {
class Registry;
}

namespace heavywater {

// `calls` is the number of calls in flight, those of health and reflection
// excluded (they may stay open for good and must not hold up a drain).
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcMetrics(
    std::shared_ptr<prometheus::Registry> registry, std::shared_ptr<std::atomic<int64_t>> calls);

}  // namespace heavywater
