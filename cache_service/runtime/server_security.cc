#include "cache_service/runtime/server_security.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/security/address.h"

namespace heavywater {
namespace {

constexpr int kMaxPort = 65535;

std::shared_ptr<grpc::ServerCredentials> TlsOf(const Certificates& certificates) {
  grpc::experimental::TlsServerCredentialsOptions options(certificates.provider());
  options.watch_identity_key_cert_pairs();
  const bool asks_clients = !certificates.files().roots.empty();
  if (asks_clients) options.watch_root_certs();
  options.set_cert_request_type(asks_clients
                                    ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  return grpc::experimental::TlsServerCredentials(options);
}

double SecondsOf(const Certificates& certificates) {
  return absl::ToDoubleSeconds(certificates.end() - absl::UnixEpoch());
}

absl::StatusOr<std::unique_ptr<Certificates>> LoadCertificates(
    const ServerSecurityOptions& options, const std::shared_ptr<prometheus::Registry>& metrics) {
  prometheus::Gauge& end = prometheus::BuildGauge()
                               .Name("heavywater_tls_certificate_end_seconds")
                               .Help("Until when the certificate in use is valid (Unix time)")
                               .Register(*metrics)
                               .Add({});
  // Known once they have been loaded first.
  const auto loaded = std::make_shared<std::atomic<const Certificates*>>(nullptr);
  HW_ASSIGN_OR_RETURN(auto certificates,
                      Certificates::Create({.certificates = options.tls_cert_file,
                                            .key = options.tls_key_file,
                                            .roots = options.tls_client_ca_file},
                                           options.reload_interval,
                                           [report = ReportReloads("tls", metrics), loaded,
                                            &end](const absl::Status& result) {
                                             report(result);
                                             const Certificates* const used = *loaded;
                                             if (used != nullptr) end.Set(SecondsOf(*used));
                                           }));
  *loaded = certificates.get();
  end.Set(SecondsOf(*certificates));
  return certificates;
}

}  // namespace

absl::Status CheckServerSecurity(const ServerSecurityOptions& options) {
  const size_t colon = options.listen_address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen_address is \"", options.listen_address, "\", want HOST:PORT"));
  }
  const std::string port = options.listen_address.substr(colon + 1);
  int number = 0;
  if (port.empty() || !std::all_of(port.begin(), port.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(port, &number) || number > kMaxPort) {
    return absl::InvalidArgumentError(absl::StrCat("listen_address is \"", options.listen_address,
                                                   "\", want a port of 0 to ", kMaxPort,
                                                   " after the colon"));
  }
  const bool tls = !options.tls_cert_file.empty();
  if (tls == options.tls_key_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(tls ? "tls_cert_file is set and tls_key_file is not"
                         : "tls_key_file is set and tls_cert_file is not",
                     ", want both for TLS"));
  }
  if (!tls && !options.tls_client_ca_file.empty()) {
    return absl::InvalidArgumentError(
        "tls_client_ca_file is set without tls_cert_file and tls_key_file, want TLS where clients "
        "are to show certificates");
  }
  if (tls || IsLoopback(options.listen_address)) return absl::OkStatus();
  if (!options.tokens_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens_file is set and listen_address is ", options.listen_address,
        " without TLS: tokens would go in plaintext, want tls_cert_file and tls_key_file, or a "
        "loopback address"));
  }
  if (options.allow_plaintext) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "listen_address is ", options.listen_address,
      ", which others can reach, and there is no TLS: want tls_cert_file and tls_key_file, a "
      "loopback address, or allow_plaintext: true"));
}

OnReload ReportReloads(std::string what, std::shared_ptr<prometheus::Registry> metrics) {
  auto& family = prometheus::BuildCounter()
                     .Name("heavywater_security_reloads_total")
                     .Help("Changed files of certificates and tokens, and whether they are used")
                     .Register(*metrics);
  prometheus::Counter& used = family.Add({{"file", what}, {"result", "used"}});
  prometheus::Counter& refused = family.Add({{"file", what}, {"result", "refused"}});
  return [what = std::move(what), metrics = std::move(metrics), &used,
          &refused](const absl::Status& result) {
    (result.ok() ? used : refused).Increment();
    if (result.ok()) {
      LogInfo("a changed file is used from now on", {{"file", what}});
    } else {
      LogError("a changed file is no good; the old one stays in use",
               {{"file", what}, {"error", result.message()}});
    }
  };
}

absl::StatusOr<std::unique_ptr<ServerSecurity>> ServerSecurity::Create(
    const ServerSecurityOptions& options, std::shared_ptr<prometheus::Registry> metrics) {
  HW_RETURN_IF_ERROR(CheckServerSecurity(options));
  std::unique_ptr<ServerSecurity> made(new ServerSecurity);
  HW_RETURN_IF_ERROR(made->Load(options, metrics));
  made->access_ = std::make_unique<Access>(made->tokens_.get(), *metrics);
  if (made->certificates_ != nullptr) {
    made->credentials_ = TlsOf(*made->certificates_);
  } else if (made->tokens_ != nullptr) {
    // Plaintext that refuses other machines, and, unlike InsecureServerCredentials(),
    // can look at tokens.
    made->credentials_ = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  } else {
    made->credentials_ = grpc::InsecureServerCredentials();
  }
  if (made->tokens_ != nullptr) {
    made->credentials_->SetAuthMetadataProcessor(made->access_->MakeProcessor());
  }
  return made;
}

ServerSecurity::~ServerSecurity() = default;

absl::Status ServerSecurity::Load(const ServerSecurityOptions& options,
                                  const std::shared_ptr<prometheus::Registry>& metrics) {
  if (!options.tls_cert_file.empty()) {
    HW_ASSIGN_OR_RETURN(certificates_, LoadCertificates(options, metrics));
  }
  if (options.tokens_file.empty()) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(tokens_, Tokens::Create(options.tokens_file, options.reload_interval,
                                              ReportReloads("tokens_file", metrics)));
  return absl::OkStatus();
}

}  // namespace heavywater
