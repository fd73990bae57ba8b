// What operators do at a running cache service.
#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/shortage.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/server/cache_service_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

class AdminServiceTest : public CacheServiceFixture {
 protected:
  void SetUp() override {
    Restart();
    Form(1);
  }
  template <typename Request, typename Response>
  using Call = grpc::Status (v1::AdminService::Stub::*)(grpc::ClientContext*, const Request&,
                                                        Response*);
  template <typename Request, typename Response>
  absl::StatusOr<Response> Do(Call<Request, Response> call, Request request) {
    if (request.request_id().empty()) request.set_request_id(absl::StrCat("r", ++requests_));
    grpc::ClientContext context;
    Response response;
    const grpc::Status status = (admin_.get()->*call)(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }
  absl::StatusOr<v1::SetQuotaResponse> SetQuota(const std::string& tenant, int64_t host_bytes,
                                                const std::string& request_id = "") {
    v1::SetQuotaRequest request;
    request.set_request_id(request_id);
    request.set_tenant(tenant);
    request.mutable_quota()->set_host_bytes(host_bytes);
    return Do(&v1::AdminService::Stub::SetQuota, request);
  }
  absl::StatusOr<v1::DrainResponse> Drain(int64_t deadline_ms, bool undo = false) {
    v1::DrainRequest request;
    request.set_deadline_ms(deadline_ms);
    request.set_undo(undo);
    return Do(&v1::AdminService::Stub::Drain, request);
  }
  v1::StatsResponse Stats() {
    grpc::ClientContext context;
    v1::StatsResponse response;
    EXPECT_TRUE(admin_->Stats(&context, {}, &response).ok());
    return response;
  }
  void Report(SequenceId id, int tokens) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id, tokens);
    grpc::ClientContext context;
    v1::ReportPlanResponse response;
    const grpc::Status status = groups_->ReportPlan(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  // Of one page of each layer and head.
  SequenceId OpenAndFinish() {
    const auto id = Open(absl::StrCat("open-", ++requests_), 16);
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(Reserve(*id, 1).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        EXPECT_TRUE(Write({*id, layer, head, 0, 16}).ok());
      }
    }
    EXPECT_TRUE(Commit(*id, 16).ok());
    Report(*id, 16);
    return *id;
  }

  int requests_ = 0;
};

TEST_F(AdminServiceTest, AQuotaIsEnforcedAtAdmissionAndNamesTenantNeedAndLimit) {
  ASSERT_TRUE(SetQuota("", 10 * kPage).ok());
  ASSERT_TRUE(Open("a", 16).ok());
  const absl::Status refused = Open("b", 32).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("tenant \"\": need 32768"));
  ASSERT_TRUE(ShortageOf(refused).has_value()) << "QuotaFailure crosses gRPC";
  EXPECT_EQ(ShortageOf(refused)->subject, "tenant:/host_bytes");
  EXPECT_EQ(ShortageOf(refused)->limit, 10 * kPage);
  const v1::StatsResponse stats = Stats();
  ASSERT_EQ(stats.tenants_size(), 1);
  EXPECT_EQ(stats.tenants(0).used().host_bytes(), 4 * kPage);
  EXPECT_EQ(stats.tenants(0).used().sequences(), 1);
  EXPECT_TRUE(stats.tenants(0).own_quota());
  EXPECT_GE(stats.quota_refusals(), 1);
}

TEST_F(AdminServiceTest, AReplayedMutationGetsItsFirstAnswerAndAnotherOneIsRefused) {
  ASSERT_TRUE(SetQuota("acme", 5, "once").ok());
  ASSERT_TRUE(SetQuota("acme", 6).ok());
  const auto replay = SetQuota("acme", 5, "once");
  ASSERT_TRUE(replay.ok());
  EXPECT_EQ(replay->tenant().quota().host_bytes(), 5);
  EXPECT_EQ(Stats().tenants(0).quota().host_bytes(), 6) << "nothing was done again";
  EXPECT_EQ(SetQuota("acme", 7, "once").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(SetQuota("acme", -1).status().code(), absl::StatusCode::kInvalidArgument);
  v1::PinRequest pin;
  pin.set_request_id(std::string(129, 'x'));
  EXPECT_EQ(Do(&v1::AdminService::Stub::Pin, pin).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(AdminServiceTest, TheConfigurationsQuotaHoldsForTenantsWithoutTheirOwn) {
  config_.set_tenant_sequences(1);
  Restart();
  Form(1);
  ASSERT_TRUE(Open("a", 16).ok());
  EXPECT_EQ(ShortageOf(Open("b", 16).status())->subject, "tenant:/sequences");
  ASSERT_TRUE(SetQuota("", 0).ok());
  EXPECT_TRUE(Open("b", 16).ok());
}

TEST_F(AdminServiceTest, ADrainTakesNoNewSequencesAndEndsWhenNoneRuns) {
  const SequenceId running = *Open("a", 16);
  absl::StatusOr<v1::DrainResponse> drained;
  std::thread caller([&] { drained = Drain(60'000); });
  while (!Stats().has_drain()) std::this_thread::yield();
  EXPECT_EQ(Open("b", 16).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Reserve(running, 1).ok()) << "what is there goes on";
  EXPECT_EQ(Stats().drain().running_sequences(), 1);
  Report(running, 16);
  server_->Tick();
  caller.join();
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(drained->drain().running_sequences(), 0);
  EXPECT_EQ(Open("b", 16).status().code(), absl::StatusCode::kUnavailable) << "it stays so";
  ASSERT_TRUE(Drain(0, /*undo=*/true).ok());
  EXPECT_TRUE(Open("b", 16).ok());
  EXPECT_FALSE(Stats().has_drain());
}

TEST_F(AdminServiceTest, ADrainEndsAtItsDeadlineSayingWhatStillRuns) {
  ASSERT_TRUE(Open("a", 16).ok());
  absl::StatusOr<v1::DrainResponse> drained;
  std::thread caller([&] { drained = Drain(1000); });
  while (!Stats().has_drain()) std::this_thread::yield();
  clock_.Advance(absl::Seconds(2));
  server_->Tick();
  caller.join();
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(drained->drain().running_sequences(), 1);
  v1::DrainRequest both;
  both.set_undo(true);
  both.set_suspend(true);
  EXPECT_EQ(Do(&v1::AdminService::Stub::Drain, both).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(AdminServiceTest, ADrainWhoseCallerLeavesHasNotEndedForWhoeverAsksAgain) {
  const SequenceId running = *Open("a", 16);
  v1::DrainRequest request;
  request.set_request_id("drain");
  request.set_deadline_ms(60'000);
  grpc::ClientContext leaves;
  grpc::Status left;
  std::thread first([&] {
    v1::DrainResponse response;
    left = admin_->Drain(&leaves, request, &response);
  });
  while (!Stats().has_drain()) std::this_thread::yield();
  leaves.TryCancel();
  first.join();
  EXPECT_EQ(left.error_code(), grpc::StatusCode::CANCELLED);
  // The service hears of it a moment later.
  std::atomic<bool> ended = false;
  absl::StatusOr<v1::DrainResponse> again;
  for (int i = 0; i < 20; ++i) {
    server_->Tick();
    absl::SleepFor(absl::Milliseconds(5));
  }
  std::thread second([&] {
    again = Do(&v1::AdminService::Stub::Drain, request);
    ended = true;
  });
  for (int i = 0; i < 20; ++i) {
    server_->Tick();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_FALSE(ended) << again.status() << again->DebugString();
  Report(running, 16);
  while (!ended) server_->Tick();
  second.join();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->drain().running_sequences(), 0);
}

TEST_F(AdminServiceTest, AProcessThatEndsAnswersWhoeverWaitsForADrainOrWatches) {
  ASSERT_TRUE(Open("a", 16).ok());
  absl::StatusOr<v1::DrainResponse> drained;
  std::thread caller([&] { drained = Drain(60'000); });
  grpc::ClientContext context;
  const auto watch = admin_->Watch(&context, {});
  v1::WatchResponse message;
  while (!Stats().has_drain()) std::this_thread::yield();
  server_->Tick();
  ASSERT_TRUE(watch->Read(&message));
  server_->BeginDrain();
  caller.join();
  EXPECT_EQ(drained.status().code(), absl::StatusCode::kUnavailable);
  while (watch->Read(&message)) {
  }
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(AdminServiceTest, WatchTellsFiguresAndEveryEventOnce) {
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_interval_ms(100);
  const auto watch = admin_->Watch(&context, request);
  watch->WaitForInitialMetadata();
  v1::WatchResponse message;
  server_->Tick();
  ASSERT_TRUE(watch->Read(&message));
  EXPECT_EQ(message.events_size(), 0);
  EXPECT_EQ(message.stats().tiers_size(), 1);
  ASSERT_TRUE(SetQuota("acme", 5).ok());
  ASSERT_TRUE(SetQuota("acme", 6).ok());
  server_->Tick();  // not due yet: nothing is sent
  clock_.Advance(absl::Milliseconds(150));
  server_->Tick();
  ASSERT_TRUE(watch->Read(&message));
  ASSERT_EQ(message.events_size(), 2);
  EXPECT_EQ(message.events(1).kind(), "quota");
  EXPECT_THAT(message.events(1).text(), HasSubstr("acme"));
  EXPECT_EQ(message.events(1).number(), message.events(0).number() + 1);
  context.TryCancel();
  EXPECT_FALSE(watch->Finish().ok());
}

TEST_F(AdminServiceTest, WithoutTiersBelowAndStateFlushAndSnapshotSaySo) {
  const absl::Status flush = Do(&v1::AdminService::Stub::Flush, v1::FlushRequest()).status();
  EXPECT_EQ(flush.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(flush.message()), HasSubstr("disk_path"));
  const absl::Status snapshot =
      Do(&v1::AdminService::Stub::Snapshot, v1::SnapshotRequest()).status();
  EXPECT_THAT(std::string(snapshot.message()), HasSubstr("state_dir"));
}

class AdminServiceOnDiskTest : public AdminServiceTest {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(::testing::TempDir(), "heavywater-admin-", getpid());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    config_.set_disk_path(folder_ + "/disk");
    config_.set_state_dir(folder_ + "/state");
    config_.set_slab_name(absl::StrCat("heavywater-admin-test-", getpid()));
    if (absl::IsInvalidArgument(CacheServer::Start(config_, clock_).status())) {
      GTEST_SKIP() << "a build without RocksDB";
    }
    AdminServiceTest::SetUp();
  }
  void TearDown() override {
    server_.reset();
    RemoveStaleSlab(config_.slab_name(), /*unfinished_too=*/true);
    std::filesystem::remove_all(folder_);
  }
  std::string folder_;
};

TEST_F(AdminServiceOnDiskTest, FlushSendsFinishedPagesDownButNotPinnedOnes) {
  const SequenceId id = OpenAndFinish();
  v1::PinRequest pin;
  pin.set_sequence_id(id);
  pin.set_owner("me");
  pin.set_ttl_ms(1000);
  ASSERT_TRUE(Do(&v1::AdminService::Stub::Pin, pin).ok());
  EXPECT_EQ(Stats().pins(), 1);
  EXPECT_EQ(Stats().pinned_bytes(), 4 * kPage);
  EXPECT_EQ(Do(&v1::AdminService::Stub::Flush, v1::FlushRequest())->moved_bytes(), 0);
  clock_.Advance(absl::Seconds(2));
  server_->Tick();
  const auto flushed = Do(&v1::AdminService::Stub::Flush, v1::FlushRequest());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  EXPECT_EQ(flushed->moved_bytes(), 4 * kPage);
  EXPECT_EQ(Stats().tiers(1).pages(), 4);
  EXPECT_EQ(Stats().tenants(0).used().lower_bytes(), 4 * kPage);
  EXPECT_EQ(*Read({id, 1, 1, 0, 16}), (TestRows{id, 1, 1, 0, 16}).Bytes(row_bytes()));
  v1::FlushRequest unknown;
  unknown.set_sequence_id(12345);
  EXPECT_EQ(Do(&v1::AdminService::Stub::Flush, unknown).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(AdminServiceOnDiskTest, QuotasPinsAndWhoHoldsWhatSurviveARestart) {
  const SequenceId id = OpenAndFinish();
  ASSERT_TRUE(SetQuota("", 6 * kPage).ok());
  v1::PinRequest pin;
  pin.set_sequence_id(id);
  pin.set_owner("me");
  pin.set_ttl_ms(3'600'000);
  ASSERT_TRUE(Do(&v1::AdminService::Stub::Pin, pin).ok());
  const auto snapshot = Do(&v1::AdminService::Stub::Snapshot, v1::SnapshotRequest());
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->sequences(), 1);
  EXPECT_GT(snapshot->bytes(), 0);
  Restart();
  const v1::StatsResponse stats = Stats();
  EXPECT_EQ(stats.pins(), 1);
  ASSERT_EQ(stats.tenants_size(), 1);
  EXPECT_EQ(stats.tenants(0).used().host_bytes(), 4 * kPage);
  EXPECT_EQ(stats.tenants(0).used().sequences(), 1);
  EXPECT_EQ(stats.tenants(0).quota().host_bytes(), 6 * kPage);
  EXPECT_EQ(Do(&v1::AdminService::Stub::Flush, v1::FlushRequest())->moved_bytes(), 0)
      << "it is pinned";
  EXPECT_EQ(ShortageOf(Open("more", 16).status())->subject, "tenant:/host_bytes");
}

}  // namespace
}  // namespace heavywater
