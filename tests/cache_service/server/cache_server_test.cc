// Groups, sequences, health, drain and metrics of a cache service in this
// process, over a real channel.
#include "cache_service/server/cache_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/health_client.h"
#include "cache_service/server/cache_config.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/server/cache_service_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using CacheServerTest = CacheServiceFixture;

TEST_F(CacheServerTest, HealthNamesLivenessAndReadiness) {
  HealthClient health(channel_);
  EXPECT_EQ(health.Check(""), "SERVING");
  EXPECT_EQ(health.Check("liveness"), "SERVING");
  EXPECT_EQ(health.Check("readiness"), "SERVING");
  EXPECT_EQ(health.Check("heavywater"), "NOT_FOUND");
}

TEST_F(CacheServerTest, RanksMeetAndExchangeValues) {
  Form(3);
  std::string received;
  std::thread waiting([&] {
    v1::WaitRequest request;
    request.set_group("group");
    request.set_epoch(epoch_);
    request.set_key("address/1");
    request.set_timeout_ms(10'000);
    grpc::ClientContext context;
    v1::WaitResponse response;
    EXPECT_TRUE(groups_->Wait(&context, request, &response).ok());
    received = response.value();
  });
  v1::PutRequest put;
  put.set_group("group");
  put.set_epoch(epoch_);
  put.set_key("address/1");
  put.set_value("127.0.0.1:4242");
  grpc::ClientContext context;
  v1::PutResponse response;
  EXPECT_TRUE(groups_->Put(&context, put, &response).ok());
  waiting.join();
  EXPECT_EQ(received, "127.0.0.1:4242");
}

TEST_F(CacheServerTest, AJoinWhoseCallerGaveUpLeavesItsPlace) {
  EXPECT_EQ(Join(0, 2, /*client_deadline_ms=*/50).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  // The service hears of it a moment later, and forgets the empty group.
  int64_t groups = 1;
  while (groups > 0) {
    server_->Tick();
    grpc::ClientContext context;
    v1::StatsResponse stats;
    ASSERT_TRUE(admin_->Stats(&context, {}, &stats).ok());
    groups = stats.groups();
  }
  EXPECT_EQ(Join(1, 2, /*client_deadline_ms=*/50).status().code(),
            absl::StatusCode::kDeadlineExceeded)
      << "nobody is there to form a group with";
  Form(2);
}

TEST_F(CacheServerTest, AnOversizeMessageNamesTheLimitAndTheServerStaysUp) {
  Form(1);
  v1::PutRequest put;
  put.set_group("group");
  put.set_epoch(epoch_);
  put.set_key("key");
  for (const int64_t size : {(4 << 20) - 1, 4 << 20, (4 << 20) + 1, 40 << 20}) {
    put.set_value(std::string(size, 'x'));
    grpc::ClientContext context;
    v1::PutResponse response;
    const grpc::Status status = groups_->Put(&context, put, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), HasSubstr("4194304"));
  }
  put.set_value(std::string(64 << 10, 'x'));
  grpc::ClientContext context;
  v1::PutResponse response;
  EXPECT_TRUE(groups_->Put(&context, put, &response).ok());
}

TEST_F(CacheServerTest, PlansReportedByAllRanksShowInGetAndGetSets) {
  Form(2);
  const auto sequence = Open("request", 20);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  for (int rank = 0; rank < 2; ++rank) {
    v1::ReportPlanRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch_);
    v1::PlanReport& report = *request.add_reports();
    report.set_sequence_id(*sequence);
    report.set_plan(1);
    report.set_tokens_seen(20);
    report.set_hash(42);
    report.set_watermark(20);
    for (int layer = 0; layer < 2 && rank == 0; ++layer) {
      v1::ReportedSet& set = *report.add_sets();
      set.set_layer(layer);
      set.set_kv_head(-1);
      for (const int position : {0, 7, 16, 17, 18, 19}) {
        set.add_positions(position);
        set.add_scores(int64_t{position} << 32);
      }
    }
    if (rank == 0) {
      for (int token = 0; token < 20; ++token) report.add_tokens(100 + token);
    }
    grpc::ClientContext context;
    v1::ReportPlanResponse response;
    ASSERT_TRUE(groups_->ReportPlan(&context, request, &response).ok());
  }
  grpc::ClientContext get_context;
  v1::GetSequenceRequest get;
  get.set_sequence_id(*sequence);
  v1::Sequence described;
  ASSERT_TRUE(sequences_->Get(&get_context, get, &described).ok());
  EXPECT_EQ(described.committed_plan(), 1);
  EXPECT_EQ(described.tokens_size(), 20);
  EXPECT_EQ(described.counts().tokens_demoted(), 14);

  grpc::ClientContext context;
  v1::GetSetsRequest request;
  request.set_sequence_id(*sequence);
  const auto stream = sequences_->GetSets(&context, request);
  v1::SequenceSet set;
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(stream->Read(&set));
    EXPECT_EQ(set.layer(), layer);
    EXPECT_THAT(set.sinks(), ElementsAre(0));
    EXPECT_THAT(set.heavy(), ElementsAre(7));
    EXPECT_THAT(set.recent(), ElementsAre(16, 17, 18, 19));
    EXPECT_THAT(set.scores(), ElementsAre(0, 7, 16, 17, 18, 19));
    EXPECT_THAT(set.demoted_ranges(), ElementsAre(1, 7, 8, 16));
  }
  EXPECT_FALSE(stream->Read(&set));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(CacheServerTest, TheEndOfALeaseEndsTheSequence) {
  Form(1);
  const auto sequence = Open("request");
  ASSERT_TRUE(sequence.ok());
  ASSERT_TRUE(Reserve(*sequence, 2).ok());
  clock_.Advance(absl::Seconds(59));
  server_->Tick();
  EXPECT_GT(HostTier().used_bytes(), 0);
  clock_.Advance(absl::Seconds(2));
  server_->Tick();
  EXPECT_EQ(HostTier().used_bytes(), 0);
  EXPECT_EQ(Close(*sequence).code(), absl::StatusCode::kNotFound);
}

TEST_F(CacheServerTest, NumbersOfAnEarlierRunDoNotComeAgain) {
  Form(1);
  const Epoch old_epoch = epoch_;
  const auto old_sequence = Open("request");
  ASSERT_TRUE(old_sequence.ok());
  clock_.Advance(absl::Seconds(1));
  Restart();
  Form(1);
  const auto sequence = Open("request");
  ASSERT_TRUE(sequence.ok());
  EXPECT_GT(*sequence, *old_sequence);
  EXPECT_LT(*sequence, uint64_t{1} << 53) << "exact in clients that count in doubles";
  EXPECT_GT(epoch_, old_epoch);
}

TEST_F(CacheServerTest, WhileItDrainsNewWorkIsUnavailableAndWaitingCallsEnd) {
  absl::Status waiting;
  std::thread rank([&] { waiting = Join(0, 2).status(); });
  HealthClient health(channel_);
  while (true) {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    ASSERT_TRUE(admin_->Stats(&context, {}, &stats).ok());
    if (stats.groups() == 1) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  server_->BeginDrain();
  rank.join();
  EXPECT_EQ(waiting.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Join(0, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Open("request").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(health.Check("readiness"), "NOT_SERVING");
  EXPECT_EQ(health.Check(""), "SERVING");
}

TEST_F(CacheServerTest, TheConfigurationInEffectReadsBack) {
  grpc::ClientContext context;
  v1::GetConfigResponse response;
  ASSERT_TRUE(admin_->GetConfig(&context, {}, &response).ok());
  const std::string path = ::testing::TempDir() + "effective.yaml";
  std::ofstream(path) << response.yaml();
  v1::CacheConfig config;
  ASSERT_TRUE(LoadConfig(path, {}, &config).ok());
  EXPECT_EQ(config.SerializeAsString(), config_.SerializeAsString());
}

TEST_F(CacheServerTest, ReflectionListsTheServices) {
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(nullptr);
  ASSERT_TRUE(next());
  grpc::Slice slice(std::string("\x3a\x01*"));  // ServerReflectionRequest.list_services
  call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  ASSERT_TRUE(next());
  grpc::Slice flat;
  ASSERT_TRUE(reply.TrySingleSlice(&flat).ok());
  const std::string text(flat.begin(), flat.end());
  for (const char* name :
       {"heavywater.v1.GroupService", "heavywater.v1.SequenceService",
        "heavywater.v1.PageStoreService", "heavywater.v1.AdminService", "grpc.health.v1.Health"}) {
    EXPECT_THAT(text, HasSubstr(name));
  }
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

// One GET over a plain socket.
std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(colon + 1), &port));
  to.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string reply;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) reply.append(buffer, n);
  close(fd);
  return reply;
}

TEST_F(CacheServerTest, MetricsShowTheTierAndTheCalls) {
  config_.set_metrics_address("127.0.0.1:0");
  Restart();
  Form(1);
  const auto sequence = Open("request");
  ASSERT_TRUE(sequence.ok());
  ASSERT_TRUE(Reserve(*sequence, 2).ok());
  const std::string text = HttpGet(server_->metrics_address(), "/metrics");
  EXPECT_THAT(text, AllOf(HasSubstr("heavywater_sequences 1"), HasSubstr("heavywater_ranks 1"),
                          HasSubstr("heavywater_tier_pages{tier=\"host\"} 8"),
                          HasSubstr("heavywater_tier_bytes{tier=\"host\",state=\"used\"} 36864"),
                          HasSubstr("heavywater_rpcs_total{code=\"OK\",method=\"/heavywater.v1."
                                    "SequenceService/Open\"} 1")));
}

TEST_F(CacheServerTest, EachTierBelowHasItsFiguresInStatsAndMetrics) {
  const std::string folder = ::testing::TempDir() + "heavywater-server-test-disk";
  config_.set_metrics_address("127.0.0.1:0");
  config_.set_disk_path(folder);
  config_.set_disk_bytes(1 << 20);
  server_.reset();
  auto server = CacheServer::Start(config_, clock_);
  if (absl::IsInvalidArgument(server.status())) GTEST_SKIP() << server.status();
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  const auto admin = v1::AdminService::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::StatsResponse stats;
  ASSERT_TRUE(admin->Stats(&context, {}, &stats).ok());
  ASSERT_EQ(stats.tiers_size(), 2);
  EXPECT_EQ(stats.tiers(0).tier(), "host");
  EXPECT_EQ(stats.tiers(1).tier(), "disk");
  EXPECT_EQ(stats.tiers(1).total_bytes(), 1 << 20);
  EXPECT_EQ(stats.tiers(1).free_bytes(), 1 << 20);
  const std::string text = HttpGet(server_->metrics_address(), "/metrics");
  EXPECT_THAT(text,
              AllOf(HasSubstr("heavywater_tier_bytes{tier=\"disk\",state=\"free\"} 1048576"),
                    HasSubstr("heavywater_tier_pages{tier=\"disk\"} 0"),
                    HasSubstr("heavywater_tier_hits_total{tier=\"disk\"} 0"),
                    HasSubstr("heavywater_tier_moves_total{tier=\"disk\",direction=\"up\"} 0"),
                    HasSubstr("heavywater_tier_failures_total{tier=\"disk\",reason=\"full\"} 0")));
  server_.reset();
  std::filesystem::remove_all(folder);
}

TEST(CacheServerStartTest, RefusesConfigurationsThatCannotWorkNamingTheField) {
  const auto start = [](auto change) {
    v1::CacheConfig config = DefaultCacheConfig();
    config.set_listen_address("127.0.0.1:0");
    change(config);
    const auto server = CacheServer::Start(config);
    return std::string(server.status().message());
  };
  EXPECT_THAT(start([](auto& c) { c.set_host_bytes(0); }), HasSubstr("host_bytes is 0"));
  EXPECT_THAT(start([](auto& c) { c.set_rank_lease_ms(-1); }), HasSubstr("rank_lease_ms is -1"));
  EXPECT_THAT(start([](auto& c) { c.set_slab_name("a/b"); }), HasSubstr("slab_name"));
  EXPECT_THAT(start([](auto& c) { c.set_disk_bytes(5); }), HasSubstr("disk_bytes is 5"));
  EXPECT_THAT(start([](auto& c) { c.set_redis_bytes(-1); }), HasSubstr("redis_bytes is -1"));
  EXPECT_THAT(start([](auto& c) { c.set_redis_address("nowhere"); }), HasSubstr("redis_address"));
  EXPECT_THAT(start([](auto& c) { c.set_disk_path("/proc/nowhere"); }), HasSubstr("disk_path"));
  EXPECT_THAT(start([](auto& c) { c.set_tier_low_percent(90); }),
              HasSubstr("tier_low_percent is 90, want 1 to 89"));
  EXPECT_THAT(start([](auto& c) { c.set_listen_address("nowhere"); }),
              HasSubstr("listen_address is \"nowhere\""));
  EXPECT_THAT(start([](auto& c) { c.set_metrics_address("nowhere"); }),
              HasSubstr("metrics_address is \"nowhere\""));
}

}  // namespace
}  // namespace heavywater
