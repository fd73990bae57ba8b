// What happens while the pages of a sequence that is to go on come up from the tiers below.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  v1::ReportPlanRequest given_back = TestFinished(epoch_, id_, kTokens);
  given_back.mutable_reports(0)->set_plan(reopened->plan() + 1);
  given_back.mutable_reports(0)->set_incarnation(reopened->incarnation());
  AddTestState(kTokens, *given_back.mutable_reports(0));
  given_back.mutable_reports(0)->clear_tokens();  // they are known
  ASSERT_TRUE(registry_->ReportPlan(given_back).ok());
  Suspend();
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
