// Calls about sequences that wait for the tiers below, beside heartbeats.
#include "cache_service/server/sequence_service.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "cache_service/server/group_service.h"
#include "cache_service/server/page_handlers.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/fake_tier.h"

namespace heavywater {
namespace {

constexpr int64_t kUnit = 4096;
constexpr int kForks = 48;  // many more than gRPC has threads

class SequenceServiceTest : public ::testing::Test {
 protected:
  SequenceServiceTest() {
    auto disk = std::make_unique<FakeTier>("disk", 100 * StoredBytes(kUnit));
    disk_ = disk.get();
    std::vector<std::unique_ptr<LowerTier>> below;
    below.push_back(std::move(disk));
    store_ = std::make_unique<OrderedPageStore>(
        std::make_unique<HostPageStore>(*Slab::Create("", 200 * kUnit)), std::move(below),
        OrderedStoreOptions(), Clock::Real());
    registry_ = std::make_unique<Registry>(RegistryOptions(), *store_, Clock::Real());
    groups_ = std::make_unique<GroupService>(*registry_, gate_);
    sequences_ = std::make_unique<SequenceService>(*registry_, gate_, access_, bring_ups_, opens_);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(groups_.get());
    builder.RegisterService(sequences_.get());
    server_ = builder.BuildAndStart();
    const auto channel =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
    group_stub_ = v1::GroupService::NewStub(channel);
    sequence_stub_ = v1::SequenceService::NewStub(channel);
    registry_->groups().Join(registry_->groups().NewTicket(), TestJoin(0, 1),
                             [this](absl::StatusOr<v1::JoinResponse> joined) {
                               ASSERT_TRUE(joined.ok()) << joined.status();
                               epoch_ = joined->epoch();
                             });
  }

  // With a state, and all of its pages on the disk.
  SequenceId MakeBelow() { return MakeBelow(TestOpen("request", epoch_)); }
  SequenceId MakeBelow(const v1::OpenSequenceRequest& opened) {
    const SequenceId id = registry_->Open(opened)->sequence_id();
    EXPECT_TRUE(store_->Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 2}, false).ok());
    const std::vector<std::byte> page(kUnit);
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(store_->Write(0, {id, i / 4, i / 2 % 2, i % 2 * 16, 16}, page).ok());
    }
    EXPECT_TRUE(store_->Commit(id, 0, 32).ok());
    v1::ReportPlanRequest request = TestFinished(epoch_, id, 32);
    AddTestState(32, *request.mutable_reports(0));
    request.mutable_reports(0)->set_plan(1);
    EXPECT_TRUE(registry_->ReportPlan(request).ok());
    while (store_->FlushBatch(id) > 0) {
    }
    EXPECT_EQ(store_->HostBytes(id), 0);
    return id;
  }
  grpc::Status Heartbeat() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::HeartbeatRequest request;
    request.set_group("group");
    request.set_rank(0);
    request.set_epoch(epoch_);
    v1::HeartbeatResponse response;
    return group_stub_->Heartbeat(&context, request, &response);
  }
  grpc::Status Open(const v1::OpenSequenceRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
    v1::OpenSequenceResponse response;
    return sequence_stub_->Open(&context, request, &response);
  }
  grpc::Status Fork(SequenceId id, int number) {
    grpc::ClientContext context;
    v1::ForkSequenceRequest request;
    request.set_sequence_id(id);
    request.set_request_id(absl::StrCat("fork-", number));
    v1::ForkSequenceResponse response;
    return sequence_stub_->Fork(&context, request, &response);
  }

  FakeTier* disk_ = nullptr;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<Registry> registry_;
  DrainGate gate_;
  prometheus::Registry metrics_;
  const Access access_{nullptr, metrics_};
  ThreadExecutor bring_ups_{/*max_queued=*/kForks, /*num_threads=*/2};
  ThreadExecutor opens_{/*max_queued=*/1};
  std::unique_ptr<GroupService> groups_;
  std::unique_ptr<SequenceService> sequences_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::GroupService::Stub> group_stub_;
  std::unique_ptr<v1::SequenceService::Stub> sequence_stub_;
  Epoch epoch_ = 0;
};

TEST_F(SequenceServiceTest, HeartbeatsAreAnsweredWhileManyCallsWaitForATierBelow) {
  const SequenceId id = MakeBelow();
  absl::Notification waits;
  absl::Notification go_on;
  disk_->OnGet([&] {
    if (!waits.HasBeenNotified()) waits.Notify();
    go_on.WaitForNotification();
  });
  std::vector<std::thread> clients;
  std::vector<grpc::Status> forked(kForks);
  clients.emplace_back([&] { forked[0] = Fork(id, 0); });
  waits.WaitForNotification();
  for (int i = 1; i < kForks; ++i) {
    clients.emplace_back([&, i] { forked[static_cast<size_t>(i)] = Fork(id, i); });
  }
  for (int i = 0; i < 10; ++i) {
    const grpc::Status beat = Heartbeat();
    EXPECT_TRUE(beat.ok()) << beat.error_message();
  }
  go_on.Notify();
  for (std::thread& client : clients) client.join();
  for (const grpc::Status& status : forked) {
    // Of one service's own bound: never an error of another kind.
    const bool known = status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                       status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    EXPECT_TRUE(known) << status.error_message();
  }
  EXPECT_TRUE(forked[0].ok()) << forked[0].error_message();
}

TEST_F(SequenceServiceTest, WhatNeedsNothingFromBelowIsOpenedWhileAllBringUpsWait) {
  const SequenceId id = MakeBelow();
  absl::Notification go_on;
  absl::BlockingCounter waits(2);
  disk_->OnGet([&, left = std::make_shared<std::atomic<int>>(2)] {
    if (left->fetch_sub(1) > 0) waits.DecrementCount();
    go_on.WaitForNotification();
  });
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&, i] { (void)Fork(id, i); });
  }
  waits.Wait();
  v1::OpenSequenceRequest request = TestOpen("other", epoch_);
  EXPECT_TRUE(Open(request).ok());
  // Nor one whose prompt nobody has stored.
  request.set_request_id("prompt");
  for (int32_t token = 0; token < 20; ++token) request.mutable_prefix()->add_tokens(500 + token);
  request.mutable_prefix()->set_max_tokens(19);
  EXPECT_TRUE(Open(request).ok());
  go_on.Notify();
  for (std::thread& client : clients) client.join();
}

TEST_F(SequenceServiceTest, APromptThatBeginsBelowWaitsWhereItHoldsNobodyElseUp) {
  v1::OpenSequenceRequest request = TestOpen("other", epoch_);
  for (int32_t token = 0; token < 20; ++token) request.mutable_prefix()->add_tokens(100 + token);
  request.mutable_prefix()->set_max_tokens(19);
  EXPECT_FALSE(registry_->sequences().OpenMayWait(request));
  v1::OpenSequenceRequest offers = TestOpen("request", epoch_);
  *offers.mutable_prefix() = request.prefix();
  const SequenceId id = MakeBelow(offers);
  EXPECT_TRUE(registry_->sequences().OpenMayWait(request));
  ASSERT_TRUE(store_->BringUp(id).ok());
  EXPECT_FALSE(registry_->sequences().OpenMayWait(request));
}

TEST_F(SequenceServiceTest, AReserveWhoseProcessIsReplacedMeanwhileDoesNotLearnWhereThePagesAre) {
  const SequenceId id = MakeBelow();
  PageHandlers handlers(*registry_, *store_, nullptr);
  v1::ReserveRequest request;
  request.set_sequence_id(id);
  request.set_epoch(epoch_);
  request.set_num_kv_heads(2);
  request.set_num_pages(2);
  disk_->OnGet([&, joined = false]() mutable {
    if (std::exchange(joined, true)) return;
    registry_->groups().Join(registry_->groups().NewTicket(), TestJoin(0, 1, "second"),
                             [](const absl::StatusOr<v1::JoinResponse>& again) {
                               EXPECT_TRUE(again.ok()) << again.status();
                             });
  });
  const auto reserved = handlers.Reserve(request);
  EXPECT_EQ(reserved.status().code(), absl::StatusCode::kAborted) << reserved.status();
}

}  // namespace
}  // namespace heavywater
