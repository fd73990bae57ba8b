#include "cache_service/runtime/access.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/server_context.h>
#include <prometheus/counter.h>
#include <prometheus/registry.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/method_roles.h"

namespace heavywater {
namespace {

constexpr double kLinesPerSecond = 10;

constexpr char kNoToken[] = "no_token";
constexpr char kUnknownToken[] = "unknown_token";
constexpr char kRole[] = "role";
constexpr char kUndeclared[] = "undeclared_method";
constexpr char kTenant[] = "tenant";

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

absl::string_view Authorization(const grpc::AuthMetadataProcessor::InputMetadata& metadata) {
  const auto found = metadata.find("authorization");
  return found == metadata.end() ? absl::string_view() : View(found->second);
}

// Runs on gRPC's own threads: it computes a hash and waits for nothing.
class Processor final : public grpc::AuthMetadataProcessor {
 public:
  explicit Processor(const Access& access) : access_(access) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override {
    const auto method = metadata.find(":path");
    std::string subject;
    for (const grpc::string_ref& name :
         context->FindPropertyValues(GRPC_X509_SUBJECT_PROPERTY_NAME)) {
      subject = std::string(name.data(), name.size());
    }
    return ToGrpcStatus(access_.Authorize(method == metadata.end() ? "" : View(method->second),
                                          Authorization(metadata), subject));
  }

 private:
  const Access& access_;
};

}  // namespace

Access::Access(const Tokens* tokens, prometheus::Registry& metrics)
    : tokens_(tokens), log_limit_(kLinesPerSecond) {
  if (tokens == nullptr) return;
  auto& family = prometheus::BuildCounter()
                     .Name("heavywater_refused_calls_total")
                     .Help("Calls that were refused for who made them, by reason")
                     .Register(metrics);
  for (const char* reason : {kNoToken, kUnknownToken, kRole, kUndeclared, kTenant}) {
    refused_[reason] = &family.Add({{"reason", reason}});
  }
}

absl::Status Access::Refuse(const absl::Status& status, const char* reason,
                            absl::string_view method, absl::string_view certificate_name) const {
  const auto counter = refused_.find(reason);
  if (counter != refused_.end()) counter->second->Increment();
  if (const std::optional<int64_t> suppressed = log_limit_.Allow(absl::Now())) {
    LogWarn("call refused", {{"method", method},
                             {"reason", reason},
                             {"certificate", certificate_name},
                             {"not_logged_before", *suppressed}});
  }
  return status;
}

absl::Status Access::Authorize(absl::string_view method, absl::string_view authorization,
                               absl::string_view certificate_name) const {
  if (tokens_ == nullptr) return absl::OkStatus();
  const std::optional<RoleSet> roles = RolesOf(method);
  if (!roles.has_value()) {
    return Refuse(
        absl::PermissionDeniedError(absl::StrCat("no role may call ", method.substr(0, 128))),
        kUndeclared, method.substr(0, 128), certificate_name);
  }
  if (roles->empty()) return absl::OkStatus();
  const absl::string_view token = BearerToken(authorization);
  if (token.empty()) {
    return Refuse(absl::UnauthenticatedError(
                      absl::StrCat(method, " has no token, want one of role ", roles->Names(),
                                   " in the metadata: authorization: Bearer TOKEN")),
                  kNoToken, method, certificate_name);
  }
  const std::shared_ptr<const Caller> caller = tokens_->Find(token);
  if (caller == nullptr) {
    return Refuse(
        absl::UnauthenticatedError(absl::StrCat("the token is not known here, want one of role ",
                                                roles->Names(), " for ", method)),
        kUnknownToken, method, certificate_name);
  }
  if (roles->contains(caller->role)) return absl::OkStatus();
  return Refuse(
      absl::PermissionDeniedError(absl::StrCat("the token's role is ", RoleName(caller->role),
                                               ", want ", roles->Names(), " for ", method)),
      kRole, method, certificate_name);
}

std::shared_ptr<const Caller> Access::CallerOf(const grpc::ServerContextBase& context) const {
  return tokens_->Find(BearerToken(Authorization(context.client_metadata())));
}

Viewer Access::ViewerOf(const grpc::ServerContextBase& context) const {
  if (tokens_ == nullptr) return Viewer::All();
  const std::shared_ptr<const Caller> caller = CallerOf(context);
  if (caller == nullptr) return Viewer::Nobody();
  return caller->tenant.empty() ? Viewer::All() : Viewer::Tenant(caller->tenant);
}

absl::StatusOr<std::string> Access::TenantFor(const grpc::ServerContextBase& context,
                                              const std::string& tenant) const {
  const Viewer viewer = ViewerOf(context);
  if (viewer.sees_all()) return tenant;
  if (viewer.sees_nothing()) return absl::UnauthenticatedError("the token is not known here");
  if (tenant.empty() || tenant == viewer.tenant()) return viewer.tenant();
  return Refuse(absl::PermissionDeniedError(absl::StrCat(
                    "tenant is \"", tenant, "\", want the token's own, \"", viewer.tenant(), "\"")),
                kTenant, "");
}

void Access::Audit(const grpc::ServerContextBase& context, absl::string_view method) const {
  if (tokens_ == nullptr) return;
  const std::shared_ptr<const Caller> caller = CallerOf(context);
  if (caller == nullptr || caller->role != Role::kAdmin) return;
  LogInfo("admin call", {{"method", method}, {"peer", context.peer()}});
}

std::shared_ptr<grpc::AuthMetadataProcessor> Access::MakeProcessor() const {
  return std::make_shared<Processor>(*this);
}

}  // namespace heavywater
