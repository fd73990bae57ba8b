#include "cache_service/runtime/audit.h"

#include <grpcpp/server_context.h>

#include <string>
#include <utility>

#include "cache_service/runtime/access.h"

namespace heavywater {
namespace {

using grpc::experimental::InterceptionHookPoints;

class Auditor final : public grpc::experimental::Interceptor {
 public:
  Auditor(const Access& access, const grpc::ServerContextBase& context, std::string method)
      : access_(access), context_(context), method_(std::move(method)) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      access_.Audit(context_, method_);
    }
    methods->Proceed();
  }

 private:
  const Access& access_;
  const grpc::ServerContextBase& context_;
  const std::string method_;
};

class AuditorFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit AuditorFactory(const Access& access) : access_(access) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new Auditor(access_, *info->server_context(), info->method());
  }

 private:
  const Access& access_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeAudit(
    const Access& access) {
  return std::make_unique<AuditorFactory>(access);
}

}  // namespace heavywater
