#include "cache_service/runtime/rpc_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"

namespace heavywater {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;

const prometheus::Histogram::BucketBoundaries kSecondsBuckets = {
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30};

struct Families {
  explicit Families(prometheus::Registry& registry)
      : rpcs(prometheus::BuildCounter()
                 .Name("heavywater_rpcs_total")
                 .Help("RPCs that ended, by method and status code")
                 .Register(registry)),
        seconds(prometheus::BuildHistogram()
                    .Name("heavywater_rpc_seconds")
                    .Help("Time from the start of an RPC to its end, by method")
                    .Register(registry)) {}

  prometheus::Family<prometheus::Counter>& rpcs;
  prometheus::Family<prometheus::Histogram>& seconds;
};

// Lives as long as one RPC.
class RpcTimer final : public grpc::experimental::Interceptor {
 public:
  RpcTimer(Families& families, std::string method, std::shared_ptr<std::atomic<int64_t>> calls)
      : families_(families),
        method_(std::move(method)),
        counted_(!absl::StartsWith(method_, "/grpc.")),
        calls_(std::move(calls)),
        start_(absl::Now()) {
    if (counted_) ++*calls_;
  }

  ~RpcTimer() override {
    if (counted_) --*calls_;
    families_.rpcs.Add({{"method", method_}, {"code", absl::StatusCodeToString(code_)}})
        .Increment();
    families_.seconds.Add({{"method", method_}}, kSecondsBuckets)
        .Observe(absl::ToDoubleSeconds(absl::Now() - start_));
  }

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      code_ = static_cast<absl::StatusCode>(methods->GetSendStatus().error_code());
    }
    methods->Proceed();
  }

 private:
  Families& families_;
  const std::string method_;
  const bool counted_;
  const std::shared_ptr<std::atomic<int64_t>> calls_;
  const absl::Time start_;
  absl::StatusCode code_ = absl::StatusCode::kCancelled;  // unless a status is sent
};

class RpcTimerFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  RpcTimerFactory(std::shared_ptr<prometheus::Registry> registry,
                  std::shared_ptr<std::atomic<int64_t>> calls)
      : registry_(std::move(registry)), families_(*registry_), calls_(std::move(calls)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new RpcTimer(families_, info->method(), calls_);
  }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  Families families_;
  const std::shared_ptr<std::atomic<int64_t>> calls_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcMetrics(
    std::shared_ptr<prometheus::Registry> registry, std::shared_ptr<std::atomic<int64_t>> calls) {
  return std::make_unique<RpcTimerFactory>(std::move(registry), std::move(calls));
}

}  // namespace heavywater
