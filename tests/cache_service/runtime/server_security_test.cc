// TLS and tokens between a real server and real clients.
#include "cache_service/runtime/server_security.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/server_runtime.h"
#include "heavywater/v1/admin.grpc.pb.h"
#include "tests/cache_service/security/test_certificates.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class FakeAdmin final : public v1::AdminService::Service {
 public:
  grpc::Status Stats(grpc::ServerContext*, const v1::StatsRequest*, v1::StatsResponse*) override {
    ++calls;
    return grpc::Status::OK;
  }
  std::atomic<int> calls = 0;
};

class ServerSecurityTest : public ::testing::Test {
 protected:
  ServerSecurityTest() {
    EXPECT_TRUE(InitLogging({.level = "error", .process = "test"}).ok());
    options_.listen_address = "127.0.0.1:0";
    options_.reload_interval = absl::Milliseconds(20);
    ca_ = folder_.Write("ca.pem", authority_.certificate());
  }

  void WriteIdentity(const TestIdentity& identity) {
    options_.tls_cert_file = folder_.Write("cert.pem", identity.certificate);
    options_.tls_key_file = folder_.Write("key.pem", identity.key);
  }
  void WriteTokens() {
    std::string text;
    for (const auto& [token, rest] :
         {std::pair("admin-token", "admin *"), std::pair("team-token", "client team-a")}) {
      const TokenHash hash = HashToken(token);
      absl::StrAppend(&text,
                      absl::BytesToHexString(absl::string_view(
                          reinterpret_cast<const char*>(hash.data()), hash.size())),
                      " ", rest, "\n");
    }
    options_.tokens_file = folder_.Write("tokens", text);
  }
  void Start() {
    auto security = ServerSecurity::Create(options_, metrics_);
    ASSERT_TRUE(security.ok()) << security.status();
    security_ = *std::move(security);
    auto runtime = ServerRuntime::Start(
        {.listen_address = options_.listen_address, .security = security_.get()}, {&admin_},
        metrics_);
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    runtime_ = *std::move(runtime);
  }

  // On a connection of its own.
  absl::Status Call(const ChannelSecurity& security) {
    const auto channels = Channels::Create(security);
    if (!channels.ok()) return channels.status();
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = (*channels)->Make(runtime_->address(), arguments);
    if (!channel.ok()) return channel.status();
    const auto stub = v1::AdminService::NewStub(*channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::StatsResponse response;
    return FromGrpcStatus(stub->Stats(&context, {}, &response));
  }
  // gRPC looks at its copies of the files once a second.
  absl::Status CallUntil(const ChannelSecurity& security, bool want_ok) {
    const absl::Time deadline = absl::Now() + absl::Seconds(15);
    absl::Status status = Call(security);
    while (status.ok() != want_ok && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(100));
      status = Call(security);
    }
    return status;
  }
  std::string Metrics() { return prometheus::TextSerializer().Serialize(metrics_->Collect()); }

  TestFolder folder_;
  TestAuthority authority_;
  ServerSecurityOptions options_;
  std::string ca_;
  FakeAdmin admin_;
  std::shared_ptr<prometheus::Registry> metrics_ = std::make_shared<prometheus::Registry>();
  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<ServerRuntime> runtime_;
};

TEST_F(ServerSecurityTest, ServesOverTlsWhoTrustsItsAuthorityAndNobodyElse) {
  WriteIdentity(authority_.Sign("server"));
  Start();
  EXPECT_EQ(Call({.ca_file = ca_}), absl::OkStatus());
  EXPECT_EQ(admin_.calls, 1);
  EXPECT_TRUE(absl::IsUnavailable(Call({}))) << "plaintext to TLS";
  TestAuthority other;
  const std::string other_ca = folder_.Write("other.pem", other.certificate());
  EXPECT_TRUE(absl::IsUnavailable(Call({.ca_file = other_ca})));
  EXPECT_TRUE(absl::IsUnavailable(Call({.ca_file = ca_, .server_name = "another"})));
  EXPECT_EQ(Call({.ca_file = ca_, .server_name = "server"}), absl::OkStatus());
  EXPECT_EQ(admin_.calls, 2);
}

TEST_F(ServerSecurityTest, WantsACertificateOfClientsWhereItIsToldTo) {
  WriteIdentity(authority_.Sign("server"));
  TestAuthority clients("clients");
  options_.tls_client_ca_file = folder_.Write("clients.pem", clients.certificate());
  Start();
  const auto with = [&](const TestIdentity& identity) {
    return ChannelSecurity{.ca_file = ca_,
                           .cert_file = folder_.Write("client.pem", identity.certificate),
                           .key_file = folder_.Write("client.key", identity.key)};
  };
  EXPECT_EQ(Call(with(clients.Sign("client"))), absl::OkStatus());
  EXPECT_TRUE(absl::IsUnavailable(Call({.ca_file = ca_}))) << "without one";
  EXPECT_TRUE(absl::IsUnavailable(Call(with(authority_.Sign("client"))))) << "of another authority";
  EXPECT_EQ(admin_.calls, 1);
}

TEST_F(ServerSecurityTest, UsesChangedCertificatesForNewConnections) {
  WriteIdentity(authority_.Sign("server"));
  Start();
  ASSERT_EQ(Call({.ca_file = ca_, .server_name = "server"}), absl::OkStatus());
  WriteIdentity(authority_.Sign("renewed"));
  EXPECT_EQ(CallUntil({.ca_file = ca_, .server_name = "renewed"}, true), absl::OkStatus());
  EXPECT_FALSE(Call({.ca_file = ca_, .server_name = "server"}).ok());
  EXPECT_THAT(Metrics(),
              HasSubstr("heavywater_security_reloads_total{file=\"tls\",result=\"used\"}"));
}

TEST_F(ServerSecurityTest, TellsUntilWhenTheCertificateInUseIsValid) {
  const auto end = [this] {
    for (const auto& family : metrics_->Collect()) {
      if (family.name != "heavywater_tls_certificate_end_seconds") continue;
      return family.metric.at(0).gauge.value -
             absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
    }
    return 0.0;
  };
  WriteIdentity(authority_.Sign("server", absl::Hours(1)));
  Start();
  EXPECT_NEAR(end(), 3600, 60);
  WriteIdentity(authority_.Sign("server", absl::Hours(5)));
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (end() < 4000 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_NEAR(end(), 5 * 3600, 60);
}

TEST_F(ServerSecurityTest, KeepsTheOldCertificateWhenTheNewOneIsBroken) {
  WriteIdentity(authority_.Sign("server"));
  Start();
  folder_.Write("cert.pem", "-----BEGIN CERTIFICATE-----\ngarbage\n-----END CERTIFICATE-----\n");
  absl::SleepFor(absl::Milliseconds(2'500));  // longer than gRPC takes to see a new one
  EXPECT_EQ(Call({.ca_file = ca_}), absl::OkStatus());
  EXPECT_THAT(Metrics(),
              HasSubstr("heavywater_security_reloads_total{file=\"tls\",result=\"refused\"} 1"));
  WriteIdentity(authority_.Sign("mended"));
  EXPECT_EQ(CallUntil({.ca_file = ca_, .server_name = "mended"}, true), absl::OkStatus());
}

TEST_F(ServerSecurityTest, AClientUsesItsChangedCertificates) {
  WriteIdentity(authority_.Sign("server"));
  TestAuthority clients("clients");
  options_.tls_client_ca_file = folder_.Write("clients.pem", clients.certificate());
  Start();
  const TestIdentity wrong = authority_.Sign("client");
  const auto channels =
      Channels::Create({.ca_file = ca_,
                        .cert_file = folder_.Write("client.pem", wrong.certificate),
                        .key_file = folder_.Write("client.key", wrong.key),
                        .reload_interval = absl::Milliseconds(20)});
  ASSERT_TRUE(channels.ok()) << channels.status();
  const auto call = [&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = v1::AdminService::NewStub(*(*channels)->Make(runtime_->address(), arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::StatsResponse response;
    return stub->Stats(&context, {}, &response);
  };
  EXPECT_FALSE(call().ok());
  const TestIdentity right = clients.Sign("client");
  folder_.Write("client.key", right.key);
  folder_.Write("client.pem", right.certificate);
  const absl::Time deadline = absl::Now() + absl::Seconds(15);
  while (!call().ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(100));
  EXPECT_GE(admin_.calls, 1);
}

class TokenTest : public ServerSecurityTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) WriteIdentity(authority_.Sign("server"));
    WriteTokens();
    Start();
  }
  ChannelSecurity With(const std::string& token) {
    return {.ca_file = GetParam() ? ca_ : "", .token = token};
  }
};
INSTANTIATE_TEST_SUITE_P(PlaintextAndTls, TokenTest, ::testing::Bool());

TEST_P(TokenTest, TheServiceHearsOnlyOfCallsWhoseTokenMay) {
  EXPECT_EQ(Call(With("admin-token")), absl::OkStatus());
  EXPECT_EQ(admin_.calls, 1);
  EXPECT_EQ(Call(With("team-token")).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Call(With("no-such-token")).code(), absl::StatusCode::kUnauthenticated);
  const absl::Status without = Call(With(""));
  EXPECT_EQ(without.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(without.message()), HasSubstr("authorization: Bearer TOKEN"));
  EXPECT_EQ(admin_.calls, 1);
}

TEST_P(TokenTest, AClientReadsItsTokenFileAnew) {
  const std::string path = folder_.Write("token", "no-such-token\n");
  const auto channels = Channels::Create({.ca_file = GetParam() ? ca_ : "", .token_file = path});
  ASSERT_TRUE(channels.ok()) << channels.status();
  const auto stub = v1::AdminService::NewStub(*(*channels)->Make(runtime_->address(), {}));
  const auto call = [&] {
    grpc::ClientContext context;
    v1::StatsResponse response;
    return stub->Stats(&context, {}, &response);
  };
  EXPECT_EQ(call().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  folder_.Write("token", "admin-token\n");
  EXPECT_TRUE(call().ok());
}

TEST(ChannelsTest, ATokenGoesInPlaintextToThisMachineOnly) {
  const auto channels = Channels::Create({.token = "secret"});
  ASSERT_TRUE(channels.ok()) << channels.status();
  EXPECT_TRUE((*channels)->Make("127.0.0.1:1", {}).ok());
  const auto refused = (*channels)->Make("cache:7700", {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("cache:7700"));
}

TEST(ChannelsTest, RefusesHalfOfWhatTlsNeeds) {
  EXPECT_FALSE(Channels::Create({.ca_file = "/a", .cert_file = "/b"}).ok());
  EXPECT_FALSE(Channels::Create({.cert_file = "/b", .key_file = "/c"}).ok());
  EXPECT_FALSE(Channels::Create({.token = "a", .token_file = "/b"}).ok());
  EXPECT_THAT(std::string(Channels::Create({.ca_file = "/no/such/file"}).status().message()),
              HasSubstr("/no/such/file"));
}

TEST(CheckServerSecurityTest, APortIsANumberThatFits) {
  EXPECT_TRUE(CheckServerSecurity({.listen_address = "127.0.0.1:65535"}).ok());
  EXPECT_TRUE(CheckServerSecurity({.listen_address = "[::1]:0"}).ok());
  for (const char* address : {"127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:", "127.0.0.1:+7",
                              "127.0.0.1:http", "127.0.0.1:-1", "127.0.0.1:99999999999"}) {
    const absl::Status refused = CheckServerSecurity({.listen_address = address});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("want a port of 0 to 65535")) << address;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(address));
  }
}

TEST(CheckServerSecurityTest, PlaintextIsForLoopbackUnlessItIsAllowed) {
  EXPECT_TRUE(CheckServerSecurity({.listen_address = "127.0.0.1:0"}).ok());
  const absl::Status refused = CheckServerSecurity({.listen_address = "0.0.0.0:7700"});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("0.0.0.0:7700"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("allow_plaintext"));
  EXPECT_TRUE(
      CheckServerSecurity({.listen_address = "0.0.0.0:7700", .allow_plaintext = true}).ok());
  EXPECT_TRUE(CheckServerSecurity(
                  {.listen_address = "0.0.0.0:7700", .tls_cert_file = "/a", .tls_key_file = "/b"})
                  .ok());
}

TEST(CheckServerSecurityTest, TokensDoNotGoInPlaintextToOtherMachinesEvenIfAllowed) {
  const absl::Status refused = CheckServerSecurity(
      {.listen_address = "0.0.0.0:7700", .tokens_file = "/t", .allow_plaintext = true});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("tokens_file"));
}

TEST(CheckServerSecurityTest, RefusesHalfOfWhatTlsNeeds) {
  for (const ServerSecurityOptions& half :
       {ServerSecurityOptions{.listen_address = "127.0.0.1:0", .tls_cert_file = "/a"},
        ServerSecurityOptions{.listen_address = "127.0.0.1:0", .tls_key_file = "/a"},
        ServerSecurityOptions{.listen_address = "127.0.0.1:0", .tls_client_ca_file = "/a"}}) {
    EXPECT_EQ(CheckServerSecurity(half).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace heavywater
