// Who may call what on a server, and what of it they may see.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache_service/base/viewer.h"
#include "cache_service/runtime/log_limit.h"
#include "cache_service/security/tokens.h"

namespace grpc {
class AuthMetadataProcessor;
class ServerContextBase;
}  // namespace grpc
namespace prometheus {
class Counter;
template <typename T>
class Family;
class Registry;
}  // namespace prometheus

namespace heavywater {

// Without tokens everybody may call everything. Refusals are counted
// (heavywater_refused_calls_total{reason}) and logged. Thread safe.
class Access {
 public:
  // `tokens` may be null; both must outlive it.
  Access(const Tokens* tokens, prometheus::Registry& metrics);

  bool has_tokens() const { return tokens_ != nullptr; }

  // Before a service hears of the call: `method` is "/package.Service/Method",
  // `authorization` the metadata of that name ("" = none), `certificate_name` the subject of
  // the client's certificate, for the log. UNAUTHENTICATED: no token, or nobody's;
  // PERMISSION_DENIED: its role may not, or the method has no role.
  absl::Status Authorize(absl::string_view method, absl::string_view authorization,
                         absl::string_view certificate_name = "") const;

  // What the caller may see. Nobody() for a token that is nobody's (any more).
  Viewer ViewerOf(const grpc::ServerContextBase& context) const;

  // For whom the caller acts, who asks to act for `tenant` ("" = for itself).
  // PERMISSION_DENIED naming both when that is somebody else.
  absl::StatusOr<std::string> TenantFor(const grpc::ServerContextBase& context,
                                        const std::string& tenant) const;

  // One line of the log for what an admin's token does.
  void Audit(const grpc::ServerContextBase& context, absl::string_view method) const;

  // Calls Authorize() for every call of a server whose credentials have it.
  std::shared_ptr<grpc::AuthMetadataProcessor> MakeProcessor() const;

 private:
  std::shared_ptr<const Caller> CallerOf(const grpc::ServerContextBase& context) const;
  absl::Status Refuse(const absl::Status& status, const char* reason, absl::string_view method,
                      absl::string_view certificate_name = "") const;

  const Tokens* const tokens_;
  std::map<std::string, prometheus::Counter*> refused_;  // by reason
  mutable LogLimit log_limit_;
};

}  // namespace heavywater
