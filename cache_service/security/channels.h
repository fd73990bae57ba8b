// Channels to servers of the project: plaintext or TLS, with or without a token.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/security/certificates.h"

namespace heavywater {

struct ChannelSecurity {
  // PEM, of who signs the servers' certificates: TLS is used. Empty: plaintext.
  std::string ca_file = {};
  // The client's own, for servers that want one; both or neither.
  std::string cert_file = {};
  std::string key_file = {};
  // What the servers' certificates are made out to, where that is not the address's host.
  std::string server_name = {};
  // Sent with each call; the file's, which may change, has one line. At most one of the two.
  std::string token = {};
  std::string token_file = {};
  absl::Duration reload_interval = absl::Seconds(10);
};

// Thread safe. Must outlive the channels that it makes.
class Channels {
 public:
  // INVALID_ARGUMENT naming the field or the file. `on_reload`: of certificates.
  static absl::StatusOr<std::unique_ptr<Channels>> Create(
      const ChannelSecurity& security, OnReload on_reload = [](const absl::Status&) {});

  // INVALID_ARGUMENT for a token that would go in plaintext to another machine.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Make(const std::string& address,
                                                      grpc::ChannelArguments arguments) const;
  // For calls that need none (health).
  std::shared_ptr<grpc::Channel> MakeWithoutToken(const std::string& address,
                                                  grpc::ChannelArguments arguments) const;

 private:
  bool has_token() const { return !security_.token.empty() || !security_.token_file.empty(); }
  std::shared_ptr<grpc::ChannelCredentials> Credentials(grpc::ChannelArguments& arguments) const;
  explicit Channels(ChannelSecurity security) : security_(std::move(security)) {}

  const ChannelSecurity security_;
  std::unique_ptr<Certificates> certificates_;  // null: plaintext
};

}  // namespace heavywater
