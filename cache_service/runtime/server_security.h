// What a server's configuration says of TLS and tokens, put to work.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/runtime/access.h"
#include "cache_service/security/certificates.h"
#include "cache_service/security/channels.h"
#include "cache_service/security/tokens.h"

namespace grpc {
class ServerCredentials;
}
namespace prometheus {
class Registry;
}

namespace heavywater {

// Fields of the same names in CacheConfig and WorkerConfig.
struct ServerSecurityOptions {
  std::string listen_address = {};
  std::string tls_cert_file = {};
  std::string tls_key_file = {};
  std::string tls_client_ca_file = {};
  std::string tokens_file = {};
  bool allow_plaintext = false;
  absl::Duration reload_interval = absl::Seconds(10);
};

template <typename Config>
ServerSecurityOptions ServerSecurityOf(const Config& config) {
  return {.listen_address = config.listen_address(),
          .tls_cert_file = config.tls_cert_file(),
          .tls_key_file = config.tls_key_file(),
          .tls_client_ca_file = config.tls_client_ca_file(),
          .tokens_file = config.tokens_file(),
          .allow_plaintext = config.allow_plaintext(),
          .reload_interval = absl::Milliseconds(config.security_reload_ms())};
}

// Without looking at files: INVALID_ARGUMENT naming the field. Plaintext is for loopback,
// or explicitly allowed; tokens never go in plaintext to another machine.
absl::Status CheckServerSecurity(const ServerSecurityOptions& options);
template <typename Config>
absl::Status CheckSecurityConfig(const Config& config) {
  constexpr int64_t kHourMs = 3'600'000;
  if (config.security_reload_ms() < 100 || config.security_reload_ms() > kHourMs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "security_reload_ms is ", config.security_reload_ms(), ", want 100 to ", kHourMs));
  }
  return CheckServerSecurity(ServerSecurityOf(config));
}

// Thread safe. Must outlive the server and the services that ask it.
class ServerSecurity {
 public:
  // INVALID_ARGUMENT naming the field or the file. What comes of changed files is logged,
  // and counted in heavywater_security_reloads_total{file, result}.
  static absl::StatusOr<std::unique_ptr<ServerSecurity>> Create(
      const ServerSecurityOptions& options, std::shared_ptr<prometheus::Registry> metrics);
  ~ServerSecurity();

  const Access& access() const { return *access_; }
  std::shared_ptr<grpc::ServerCredentials> credentials() const { return credentials_; }
  bool uses_tls() const { return certificates_ != nullptr; }

 private:
  ServerSecurity() = default;
  absl::Status Load(const ServerSecurityOptions& options,
                    const std::shared_ptr<prometheus::Registry>& metrics);

  std::unique_ptr<Certificates> certificates_;  // null: plaintext
  std::unique_ptr<Tokens> tokens_;              // null: everybody may call
  std::unique_ptr<Access> access_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
};

// Logs and counts what comes of changed files named `what`.
OnReload ReportReloads(std::string what, std::shared_ptr<prometheus::Registry> metrics);

}  // namespace heavywater
