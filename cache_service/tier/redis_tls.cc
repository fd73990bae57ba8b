#include "cache_service/tier/redis_tls.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// The oldest of the library's errors, which is the cause of the others; or the system's.
std::string Reason(int system_error = 0) {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code != 0) return ERR_reason_error_string(code) ? ERR_reason_error_string(code) : "TLS error";
  if (system_error == EAGAIN || system_error == EWOULDBLOCK) return "timed out";
  return system_error == 0 ? "the connection was closed" : std::strerror(system_error);
}

absl::Status BadFile(const char* field, const std::string& path) {
  return absl::InvalidArgumentError(absl::StrCat(field, " ", path, ": ", Reason()));
}

bool IsAddress(const std::string& host) {
  in6_addr unused{};
  return inet_pton(AF_INET, host.c_str(), &unused) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &unused) == 1;
}

// What its certificate must be made out to.
bool Expect(SSL* ssl, const std::string& name) {
  if (IsAddress(name)) {
    return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name.c_str()) == 1;
  }
  return SSL_set1_host(ssl, name.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, name.c_str()) == 1;
}

absl::Status HandshakeFailed(SSL* ssl, int system_error) {
  const long verified = SSL_get_verify_result(ssl);
  if (verified == X509_V_OK) {
    return absl::UnavailableError(absl::StrCat("TLS handshake: ", Reason(system_error)));
  }
  ERR_clear_error();
  return absl::UnavailableError(
      absl::StrCat("its certificate is no good: ", X509_verify_cert_error_string(verified)));
}

}  // namespace

void RedisTls::FreeContext::operator()(ssl_ctx_st* context) const { SSL_CTX_free(context); }
void RedisTls::FreeSsl::operator()(ssl_st* ssl) const { SSL_free(ssl); }

RedisTls::RedisTls(Context context, ssl_st* ssl) : context_(std::move(context)), ssl_(ssl) {}

RedisTls::~RedisTls() {
  SSL_shutdown(ssl_.get());  // a word of farewell; its answer is not waited for
  ERR_clear_error();
}

absl::StatusOr<RedisTls::Context> RedisTls::MakeContext(const RedisTlsOptions& options) {
  ERR_clear_error();
  Context context(SSL_CTX_new(TLS_client_method()));
  if (context == nullptr) return absl::UnavailableError(Reason());
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_mode(context.get(), SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (SSL_CTX_load_verify_locations(context.get(), options.ca_file.c_str(), nullptr) != 1) {
    return BadFile("redis_ca_file", options.ca_file);
  }
  if (options.cert_file.empty()) return context;
  if (SSL_CTX_use_certificate_chain_file(context.get(), options.cert_file.c_str()) != 1) {
    return BadFile("redis_cert_file", options.cert_file);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), options.key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    return BadFile("redis_key_file", options.key_file);
  }
  return context;
}

absl::Status RedisTls::Check(const RedisTlsOptions& options) {
  const bool tls = !options.ca_file.empty();
  if (!tls && !(options.server_name.empty() && options.cert_file.empty())) {
    return absl::InvalidArgumentError(
        "redis_ca_file is empty, want who signs the Redis's certificate (redis_server_name or "
        "redis_cert_file is set)");
  }
  if (options.cert_file.empty() != options.key_file.empty()) {
    return absl::InvalidArgumentError("redis_cert_file and redis_key_file: want both or neither");
  }
  return tls ? MakeContext(options).status() : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RedisTls>> RedisTls::Start(const RedisTlsOptions& options,
                                                          const std::string& host, int socket) {
  absl::StatusOr<Context> context = MakeContext(options);
  if (!context.ok()) return absl::UnavailableError(context.status().message());
  SSL* const ssl = SSL_new(context->get());
  if (ssl == nullptr) return absl::UnavailableError(Reason());
  std::unique_ptr<RedisTls> tls(new RedisTls(*std::move(context), ssl));
  if (!Expect(ssl, options.server_name.empty() ? host : options.server_name) ||
      SSL_set_fd(ssl, socket) != 1) {
    return absl::UnavailableError(Reason());
  }
  errno = 0;
  if (SSL_connect(ssl) != 1) return HandshakeFailed(ssl, errno);
  return tls;
}

absl::Status RedisTls::Write(std::span<const char> bytes) {
  while (!bytes.empty()) {
    const size_t size = std::min<size_t>(bytes.size(), INT_MAX);
    errno = 0;
    const int written = SSL_write(ssl_.get(), bytes.data(), static_cast<int>(size));
    if (written <= 0) return absl::UnavailableError(Reason(errno));
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> RedisTls::Read(std::span<char> bytes) {
  errno = 0;
  const int read =
      SSL_read(ssl_.get(), bytes.data(), static_cast<int>(std::min<size_t>(bytes.size(), INT_MAX)));
  if (read <= 0) return absl::UnavailableError(Reason(errno));
  return static_cast<size_t>(read);
}

}  // namespace heavywater
