#include "cache_service/runtime/server_runtime.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "cache_service/runtime/connection_acceptor.h"
#include "cache_service/runtime/health_client.h"
#include "heavywater/v1/admin.grpc.pb.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// Answers Stats; GetConfig stays open until its caller gives up.
class FakeAdmin final : public v1::AdminService::Service {
 public:
  grpc::Status Stats(grpc::ServerContext*, const v1::StatsRequest*,
                     v1::StatsResponse* response) override {
    response->set_version("fake");
    return grpc::Status::OK;
  }
  grpc::Status GetConfig(grpc::ServerContext* context, const v1::GetConfigRequest*,
                         v1::GetConfigResponse*) override {
    started = true;
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return grpc::Status::CANCELLED;
  }
  std::atomic<bool> started = false;
};

class ServerRuntimeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.listen_address = "127.0.0.1:0";
    options_.drain = absl::Milliseconds(300);
    auto runtime = ServerRuntime::Start(options_, {&admin_}, metrics_);
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    runtime_ = *std::move(runtime);
    channel_ = grpc::CreateChannel(runtime_->address(), grpc::InsecureChannelCredentials());
    stub_ = v1::AdminService::NewStub(channel_);
  }

  ServerRuntimeOptions options_;
  FakeAdmin admin_;
  std::shared_ptr<prometheus::Registry> metrics_ = std::make_shared<prometheus::Registry>();
  std::unique_ptr<ServerRuntime> runtime_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AdminService::Stub> stub_;
};

TEST_F(ServerRuntimeTest, HealthTellsLivenessFromReadiness) {
  HealthClient health(channel_);
  EXPECT_EQ(health.Check(""), "SERVING");
  EXPECT_EQ(health.Check("liveness"), "SERVING");
  EXPECT_EQ(health.Check("readiness"), "NOT_SERVING");
  EXPECT_EQ(health.Check("no-such-name"), "NOT_FOUND");
  runtime_->SetReady(true);
  EXPECT_EQ(health.Check("readiness"), "SERVING");
}

TEST_F(ServerRuntimeTest, WhileItDrainsHealthStillAnswersAndReadinessIsOff) {
  runtime_->SetReady(true);
  runtime_->BeginDrain();
  HealthClient health(channel_);
  EXPECT_TRUE(runtime_->draining());
  EXPECT_EQ(health.Check(""), "SERVING");
  EXPECT_EQ(health.Check("readiness"), "NOT_SERVING");
  runtime_->SetReady(true);
  EXPECT_EQ(health.Check("readiness"), "NOT_SERVING") << "a drain is not taken back";
}

// gRPC would by itself end the connection of a client that asks more often than once in
// five minutes, with "too_many_pings".
TEST_F(ServerRuntimeTest, AClientMayAskAllTheTimeWhetherTheServerIsThere) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1100);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::AdminService::NewStub(grpc::CreateCustomChannel(
      runtime_->address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(6));
  v1::GetConfigResponse response;
  const grpc::Status status = stub->GetConfig(&context, {}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
}

TEST_F(ServerRuntimeTest, DrainEndsInTimeWithACallThatNeverEnds) {
  grpc::Status status;
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::GetConfigResponse response;
    status = stub_->GetConfig(&context, {}, &response);
  });
  while (!admin_.started) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const absl::Time start = absl::Now();
  runtime_->Drain();
  caller.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  EXPECT_GE(absl::Now() - start, options_.drain);
  EXPECT_FALSE(status.ok());
}

TEST_F(ServerRuntimeTest, CountsRpcsByMethodAndCode) {
  grpc::ClientContext context;
  v1::StatsResponse response;
  ASSERT_TRUE(stub_->Stats(&context, {}, &response).ok());
  runtime_->Drain();
  const std::string text = prometheus::TextSerializer().Serialize(metrics_->Collect());
  EXPECT_THAT(text, HasSubstr("heavywater_rpcs_total{code=\"OK\","
                              "method=\"/heavywater.v1.AdminService/Stats\"} 1"));
  EXPECT_THAT(text, HasSubstr("heavywater_rpc_seconds_count{"
                              "method=\"/heavywater.v1.AdminService/Stats\"} 1"));
}

TEST_F(ServerRuntimeTest, RefusesAnAddressThatIsTakenNamingIt) {
  ServerRuntimeOptions options = options_;
  options.listen_address = runtime_->address();
  FakeAdmin other;
  const auto second = ServerRuntime::Start(options, {&other}, metrics_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(runtime_->address()));
}

TEST_F(ServerRuntimeTest, RefusesARequestAboveTheMessageLimitNamingIt) {
  grpc::GenericStub unused(channel_);
  v1::GetConfigRequest request;
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      15, std::string(4 << 20, 'x'));
  grpc::ClientContext context;
  v1::GetConfigResponse response;
  const grpc::Status status = stub_->GetConfig(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("4194304"));
}

// On a connection of its own.
class OneConnection {
 public:
  explicit OneConnection(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  bool Works() { return HealthClient(channel_).Check("") == "SERVING"; }

 private:
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ServerRuntimeTest, ClosesConnectionsBeyondTheLimitUntilOthersHaveGone) {
  options_.max_connections = 3;
  const auto runtime = ServerRuntime::Start(options_, {}, metrics_);
  ASSERT_TRUE(runtime.ok()) << runtime.status();
  std::vector<std::unique_ptr<OneConnection>> connections;
  for (int i = 0; i < 3; ++i) {
    connections.push_back(std::make_unique<OneConnection>((*runtime)->address()));
    EXPECT_TRUE(connections.back()->Works()) << i;
  }
  OneConnection another((*runtime)->address());
  EXPECT_FALSE(another.Works());
  EXPECT_TRUE(connections[0]->Works()) << "those that are there stay";
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  const auto none_refused = [&] {  // it may have run out of time before it was looked at
    return absl::StrContains(prometheus::TextSerializer().Serialize(metrics_->Collect()),
                             "heavywater_connections_refused_total 0");
  };
  while (none_refused() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(none_refused());
  EXPECT_THAT(prometheus::TextSerializer().Serialize(metrics_->Collect()),
              HasSubstr("heavywater_connections_refused_total "));
  connections.pop_back();
  while (!another.Works() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(50));
  EXPECT_TRUE(another.Works());
}

// A connection from 127.0.0.2, without gRPC; whether the server keeps it.
class RawConnection {
 public:
  explicit RawConnection(const std::string& address) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in from{};
    from.sin_family = AF_INET;
    inet_pton(AF_INET, "127.0.0.2", &from.sin_addr);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    int port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    to.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  }
  ~RawConnection() { close(fd_); }
  // gRPC sends its settings at once.
  bool IsKept() {
    char byte = 0;
    return recv(fd_, &byte, 1, 0) == 1;
  }

 private:
  int fd_;
};

TEST_F(ServerRuntimeTest, OnePeerTakesNoMoreThanItsShareAndOthersGetTheirs) {
  options_.max_connections_per_peer = 2;
  const auto runtime = ServerRuntime::Start(options_, {}, metrics_);
  ASSERT_TRUE(runtime.ok()) << runtime.status();
  std::vector<std::unique_ptr<RawConnection>> greedy;
  for (int i = 0; i < 2; ++i) {
    greedy.push_back(std::make_unique<RawConnection>((*runtime)->address()));
    EXPECT_TRUE(greedy.back()->IsKept()) << i;
  }
  EXPECT_FALSE(RawConnection((*runtime)->address()).IsKept());
  EXPECT_TRUE(OneConnection((*runtime)->address()).Works()) << "from another address";
  greedy.pop_back();
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  bool kept = false;
  while (!kept && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(50));
    kept = RawConnection((*runtime)->address()).IsKept();
  }
  EXPECT_TRUE(kept);
}

TEST_F(ServerRuntimeTest, RefusesAHostThatIsNone) {
  const auto none = ConnectionAcceptor::Listen("no such host:1", {.all = 1}, *metrics_);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("no such host"));
}

}  // namespace
}  // namespace heavywater
