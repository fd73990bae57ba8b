// What happens while the pages of a sequence that is to go on come up from the tiers below.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/fake_tier.h"

namespace heavywater {
namespace {

constexpr int64_t kTokens = 32;

class ReopenMeanwhileTest : public ::testing::Test {
 protected:
  ReopenMeanwhileTest() {
    auto disk = std::make_unique<FakeTier>("disk", 32 * StoredBytes(4096));
    disk_ = disk.get();
    std::vector<std::unique_ptr<LowerTier>> below;
    below.push_back(std::move(disk));
    store_ = std::make_unique<OrderedPageStore>(
        std::make_unique<HostPageStore>(*Slab::Create("", 40 * 4096)), std::move(below),
        OrderedStoreOptions(), clock_);
    registry_ = std::make_unique<Registry>(RegistryOptions{}, *store_, clock_);
    Join("first");
    opened_ = TestOpen("request", epoch_);
    id_ = registry_->Open(opened_)->sequence_id();
    WriteAndSuspend();
  }
  void Join(const std::string& instance) {
    registry_->groups().Join(registry_->groups().NewTicket(), TestJoin(0, 1, instance),
                             [this](absl::StatusOr<v1::JoinResponse> joined) {
                               ASSERT_TRUE(joined.ok()) << joined.status();
                               epoch_ = joined->epoch();
                             });
  }
  // For an hour, all of its pages below.
  void Suspend() {
    v1::SuspendSequenceRequest suspend;
    suspend.set_sequence_id(id_);
    const auto suspended = registry_->sequences().Suspend(suspend);
    EXPECT_TRUE(suspended.ok()) << suspended.status();
    Flush();
  }
  void Flush() {
    while (store_->FlushBatch(id_) > 0) {
    }
    EXPECT_EQ(store_->HostBytes(id_), 0);
  }
  void WriteAndSuspend() {
    EXPECT_TRUE(store_->Reserve({.sequence = id_, .heads = {0, 2}, .num_pages = 2}, false).ok());
    const std::vector<std::byte> page(4096);
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(store_->Write(0, {id_, i / 4, i / 2 % 2, i % 2 * 16, 16}, page).ok());
    }
    EXPECT_TRUE(store_->Commit(id_, 0, kTokens).ok());
    v1::ReportPlanRequest request = TestFinished(epoch_, id_, kTokens);
    AddTestState(kTokens, *request.mutable_reports(0));
    EXPECT_TRUE(registry_->ReportPlan(request).ok());
    Suspend();
  }
  v1::ReopenSequenceRequest Request() const {
    v1::ReopenSequenceRequest request = TestReopen(opened_, id_, epoch_);
    request.set_max_tokens_seen(kTokens);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    return request;
  }
  // No rank has heard of the turn.
  void GiveBack(const v1::ReopenSequenceResponse& reopened) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id_, kTokens);
    request.mutable_reports(0)->set_plan(reopened.plan());
    request.mutable_reports(0)->set_incarnation(reopened.incarnation());
    ASSERT_TRUE(registry_->ReportPlan(request).ok());
  }
  // Two pages of another one: what is read is what was written.
  void WriteAndRelease(SequenceId id) {
    const PageGeometry geometry = {
        .num_layers = 1, .num_kv_heads = 1, .page_tokens = 16, .row_bytes = 256};
    ASSERT_TRUE(store_->Open({.sequence = id, .geometry = geometry, .max_tokens = 32}).ok());
    ASSERT_TRUE(store_->Reserve({.sequence = id, .heads = {0, 1}, .num_pages = 2}, false).ok());
    const std::vector<std::byte> page(4096, static_cast<std::byte>(id));
    std::vector<std::byte> got(4096);
    for (const int64_t first : {0, 16}) {
      const RowRange rows = {.sequence = id, .first_position = first, .num_positions = 16};
      ASSERT_TRUE(store_->Write(0, rows, page).ok());
      ASSERT_TRUE(store_->Commit(id, 0, first + 16).ok());
      ASSERT_TRUE(store_->Read(rows, got).ok());
      ASSERT_EQ(got, page);
    }
    ASSERT_TRUE(store_->Release(id).ok());
  }
  bool IsSuspended() { return registry_->sequences().Get(id_)->suspended(); }

  FakeClock clock_;
  FakeTier* disk_ = nullptr;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<Registry> registry_;
  Epoch epoch_ = 0;
  v1::OpenSequenceRequest opened_;
  SequenceId id_ = 0;
};

TEST_F(ReopenMeanwhileTest, ACallerThatHasGoneDoesNotEndTheSuspension) {
  bool gone = false;
  disk_->OnGet([&] { gone = true; });
  const absl::Status status = registry_->Reopen(Request(), [&] { return gone; }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(IsSuspended());
  EXPECT_TRUE(registry_->sequences().IsCurrent(id_, 0));
  EXPECT_TRUE(registry_->Reopen(Request()).ok());
  EXPECT_FALSE(IsSuspended());
}

// As a worker does whose client has gone before there was room on the devices: no rank has
// reserved a page by then.
TEST_F(ReopenMeanwhileTest, ATurnThatIsGivenBackLetsItsPagesGoDownAgain) {
  const auto reopened = registry_->Reopen(Request());
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(store_->FlushBatch(id_), 0) << "its ranks are about to read them";
  GiveBack(*reopened);
  Suspend();
}

// Cancelled early, in the middle, and about when all of its pages have come up from a slow tier,
// while others take and give back memory.
TEST_F(ReopenMeanwhileTest, HoweverOftenTurnsAreCancelledOnTheWayNothingIsLeftBehind) {
  constexpr absl::Duration kPage = absl::Microseconds(400);
  constexpr double kWhen[] = {0.05, 0.5, 0.99, 1.01};  // of the time that its eight pages take
  disk_->OnGet([] { absl::SleepFor(kPage); });
  const PageStoreStats before = store_->Stats();
  std::atomic<bool> done = false;
  std::thread others([&] {
    for (SequenceId id = 1000; !done; ++id) WriteAndRelease(id);
  });
  int cancelled = 0;
  for (int i = 0; i < 500; ++i) {
    const absl::Time gone = absl::Now() + 8 * kWhen[i % 4] * kPage;
    const auto reopened = registry_->Reopen(Request(), [&] { return absl::Now() >= gone; });
    if (reopened.ok()) {
      GiveBack(*reopened);
      Suspend();
      continue;
    }
    ASSERT_EQ(reopened.status().code(), absl::StatusCode::kCancelled) << reopened.status();
    ++cancelled;
    Flush();
  }
  done = true;
  others.join();
  EXPECT_GE(cancelled, 250);
  EXPECT_TRUE(IsSuspended());
  const PageStoreStats after = store_->Stats();
  EXPECT_EQ(after.used_bytes, before.used_bytes);
  EXPECT_EQ(after.pages, before.pages);
  EXPECT_EQ(after.promised_bytes + after.retiring_bytes, 0);
  EXPECT_EQ(after.below.at(0).used_bytes, before.below.at(0).used_bytes);
  v1::CloseSequenceRequest close;
  close.set_sequence_id(id_);
  EXPECT_TRUE(registry_->sequences().Close(close).ok());
  close.set_request_id("again");
  EXPECT_EQ(registry_->sequences().Close(close).code(), absl::StatusCode::kNotFound);
}

// Its answer was lost, and its client has had it suspended since.
TEST_F(ReopenMeanwhileTest, WhereNoRankComesItsPagesGoDownOnceNoneMayComeAnyMore) {
  ASSERT_TRUE(registry_->Reopen(Request()).ok());
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(id_);
  ASSERT_TRUE(registry_->sequences().Suspend(suspend).ok());
  clock_.Advance(absl::Seconds(60));
  registry_->Tick();
  EXPECT_EQ(store_->FlushBatch(id_), 0) << "one may be late";
  clock_.Advance(absl::Seconds(10));
  registry_->Tick();
  Flush();
  EXPECT_TRUE(IsSuspended());
}

// Ranks go on with it in the last moment.
TEST_F(ReopenMeanwhileTest, WhoGoesOnIsNotStoppedForThoseBefore) {
  clock_.Advance(absl::Seconds(70));
  Join("another");
  ASSERT_TRUE(registry_->Reopen(Request()).ok());
  registry_->Tick();
  EXPECT_EQ(store_->FlushBatch(id_), 0) << "its ranks are about to read them";
}

TEST_F(ReopenMeanwhileTest, OneWhosePagesGoDownAgainMeanwhileHoldsNone) {
  const absl::Status status = registry_
                                  ->Reopen(Request(),
                                           [&] {
                                             Flush();
                                             return false;
                                           })
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(IsSuspended());
  ASSERT_TRUE(store_->BringUp(id_).ok());
  Flush();
}

TEST_F(ReopenMeanwhileTest, ACallOfAnEarlierFormationIsAborted) {
  disk_->OnGet([&, joined = false]() mutable {
    if (!std::exchange(joined, true)) Join("second");
  });
  const v1::ReopenSequenceRequest request = Request();
  const absl::Status status = registry_->Reopen(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_TRUE(IsSuspended());
  EXPECT_TRUE(registry_->Reopen(Request()).ok());
}

TEST_F(ReopenMeanwhileTest, ACallThatAnotherOneHasOvertakenDoesNotGoBackBehindIt) {
  const auto overtaken = [&] {
    const auto reopened = registry_->Reopen(Request());
    EXPECT_TRUE(reopened.ok()) << reopened.status();
    return false;
  };
  const absl::Status status = registry_->Reopen(Request(), overtaken).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_TRUE(registry_->sequences().IsCurrent(id_, 1));
}

}  // namespace
}  // namespace heavywater
