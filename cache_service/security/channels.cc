#include "cache_service/security/channels.h"

#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/support/client_interceptor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/security/address.h"
#include "cache_service/security/small_file.h"
#include "cache_service/security/tokens.h"

namespace heavywater {
namespace {

using grpc::experimental::InterceptionHookPoints;

// Adds the token to each call. Not gRPC's call credentials: those refuse plaintext, also
// to loopback, and keep a file's first contents.
class TokenSender final : public grpc::experimental::Interceptor {
 public:
  explicit TokenSender(std::string authorization) : authorization_(std::move(authorization)) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", authorization_);
    }
    methods->Proceed();
  }

 private:
  const std::string authorization_;
};

// What a header can carry: gRPC ends the process of whoever sends anything else, and says
// what it was. INVALID_ARGUMENT without the token.
absl::StatusOr<std::string> CleanToken(absl::string_view text) {
  const absl::string_view token = absl::StripAsciiWhitespace(text);
  const bool printable =
      std::all_of(token.begin(), token.end(), [](unsigned char c) { return c > 0x20 && c < 0x7f; });
  if (!token.empty() && token.size() <= kMaxTokenBytes && printable) return std::string(token);
  return absl::InvalidArgumentError(
      absl::StrCat("the token has ", token.size(), " bytes, want 1 to ", kMaxTokenBytes,
                   " of printable ASCII without spaces, on one line"));
}

class TokenSenderFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenSenderFactory(const ChannelSecurity& security)
      : token_(security.token), token_file_(security.token_file) {}

  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenSender(absl::StrCat("Bearer ", Token()));
  }

 private:
  // A file that cannot be read any more, or has no token: the server says that it is wrong.
  std::string Token() const {
    const absl::StatusOr<std::string> text =
        token_file_.empty() ? absl::StatusOr<std::string>(token_) : ReadSmallFile(token_file_);
    return text.ok() ? CleanToken(*text).value_or("") : "";
  }

  const std::string token_;
  const std::string token_file_;
};

absl::Status CheckToken(const ChannelSecurity& security) {
  if (!security.token.empty() && !security.token_file.empty()) {
    return absl::InvalidArgumentError("token and token_file are set, want one of the two");
  }
  if (!security.token.empty()) return CleanToken(security.token).status();
  if (security.token_file.empty()) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(security.token_file));
  const absl::Status clean = CleanToken(text).status();
  if (clean.ok()) return clean;
  return absl::InvalidArgumentError(
      absl::StrCat("token_file ", security.token_file, ": ", clean.message()));
}

absl::Status CheckFiles(const ChannelSecurity& security) {
  if (security.cert_file.empty() != security.key_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("of a client's certificate and key only ",
                     security.key_file.empty() ? "cert_file" : "key_file", " is set, want both"));
  }
  if (!security.ca_file.empty()) return absl::OkStatus();
  if (security.cert_file.empty() && security.server_name.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(security.cert_file.empty() ? "server_name" : "cert_file",
                   " is set without ca_file, want the file of certificates that servers are "
                   "checked with"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Channels>> Channels::Create(const ChannelSecurity& security,
                                                           OnReload on_reload) {
  HW_RETURN_IF_ERROR(CheckToken(security));
  HW_RETURN_IF_ERROR(CheckFiles(security));
  std::unique_ptr<Channels> made(new Channels(security));
  if (security.ca_file.empty()) return made;
  HW_ASSIGN_OR_RETURN(
      made->certificates_,
      Certificates::Create(
          {.certificates = security.cert_file, .key = security.key_file, .roots = security.ca_file},
          security.reload_interval, std::move(on_reload)));
  return made;
}

std::shared_ptr<grpc::ChannelCredentials> Channels::Credentials(
    grpc::ChannelArguments& arguments) const {
  if (certificates_ == nullptr) {
    // Loopback is no loopback through somebody's proxy.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return grpc::InsecureChannelCredentials();
  }
  // So long may connecting take, at least; the callers' own values are for plaintext. It has
  // no bearing on how soon a refused connection is tried again.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 3'000);
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(certificates_->provider());
  options.watch_root_certs();
  if (!security_.key_file.empty()) options.watch_identity_key_cert_pairs();
  if (!security_.server_name.empty()) arguments.SetSslTargetNameOverride(security_.server_name);
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::Channel> Channels::MakeWithoutToken(const std::string& address,
                                                          grpc::ChannelArguments arguments) const {
  const auto credentials = Credentials(arguments);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Channels::Make(
    const std::string& address, grpc::ChannelArguments arguments) const {
  if (!has_token()) return MakeWithoutToken(address, std::move(arguments));
  if (certificates_ == nullptr && !IsLoopback(address)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a token would go to ", address,
                     " in plaintext, want TLS (a file of trusted certificates) or a loopback "
                     "address"));
  }
  const auto credentials = Credentials(arguments);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<TokenSenderFactory>(security_));
  return grpc::experimental::CreateCustomChannelWithInterceptors(address, credentials, arguments,
                                                                 std::move(interceptors));
}

}  // namespace heavywater
