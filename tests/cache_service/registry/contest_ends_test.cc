// When the contests of sequences end whose processes were replaced, beside calls that contest
// them anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/memory_state.h"

namespace heavywater {
namespace {

constexpr int64_t kTokens = 24;  // in the middle of the second page

// Calls what it was told to when the pages of a sequence are kept.
class WatchedState final : public StateStore {
 public:
  void Apply(const StateBatch& batch) override {
    kept_.Apply(batch);
    for (const StateBatch::Change& change : batch.changes()) {
      std::function<void()> hook;
      {
        MutexLock lock(&mutex_);
        const auto found = hooks_.find(change.key);
        if (found == hooks_.end()) continue;
        hook = std::move(found->second);
        hooks_.erase(found);
      }
      hook();
    }
  }
  absl::Status broken() const override { return absl::OkStatus(); }
  absl::Status ForEach(const std::string& prefix, const Visit& visit) const override {
    return kept_.ForEach(prefix, visit);
  }
  void Once(SequenceId id, std::function<void()> hook) {
    MutexLock lock(&mutex_);
    hooks_[StateKey(StateKind::kPages, id)] = std::move(hook);
  }

 private:
  MemoryState kept_;
  Mutex mutex_;
  std::map<std::string, std::function<void()>> hooks_ ABSL_GUARDED_BY(mutex_);
};

class ContestEndsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Join("first");
    first_ = Make("a");
    second_ = Make("b");
  }
  void Join(const std::string& instance) {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1, instance),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok()) << joined.status();
                              epoch_ = joined->epoch();
                            });
    ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  }
  // With a state to go on from.
  SequenceId Make(const std::string& request_id) {
    opened_ = TestOpen(request_id, epoch_);
    const SequenceId id = registry_.Open(opened_)->sequence_id();
    Reserve(id);
    v1::ReportPlanRequest request = TestFinished(epoch_, id, kTokens);
    AddTestState(kTokens, *request.mutable_reports(0));
    request.mutable_reports(0)->set_finished(false);
    const auto taken = registry_.ReportPlan(request);
    EXPECT_TRUE(taken.ok()) << taken.status();
    EXPECT_TRUE(registry_.sequences().Get(id).ok());  // the state is committed by now
    return id;
  }
  Reservation Reserve(SequenceId id) {
    auto reserved =
        store_.Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 2}, /*direct=*/true);
    EXPECT_TRUE(reserved.ok()) << reserved.status();
    if (!reserved.ok()) return {};
    store_.slab().Watermark(reserved->watermark_offset).store(kTokens);
    return *std::move(reserved);
  }
  void Reopen(SequenceId id) {
    v1::ReopenSequenceRequest request = TestReopen(opened_, id, epoch_);
    request.set_max_tokens_seen(kTokens);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    const auto reopened = registry_.Reopen(request);
    EXPECT_TRUE(reopened.ok()) << reopened.status();
  }
  void Pass(absl::Duration duration) {
    clock_.Advance(duration);
    registry_.sequences().RenewOne(first_);
    registry_.sequences().RenewOne(second_);
  }

  FakeClock clock_;
  WatchedState state_;
  HostPageStore store_{*Slab::Create("", 80 * 4096), &state_};
  Registry registry_{RegistryOptions(), store_, clock_, &state_};
  Epoch epoch_ = 0;
  v1::OpenSequenceRequest opened_;
  SequenceId first_ = 0;
  SequenceId second_ = 0;
};

TEST_F(ContestEndsTest, OneThatIsContestedAnewWhileItsEarlierContestEndsStaysContested) {
  Join("second");
  Reopen(first_);
  Reopen(second_);
  Reserve(first_);
  const Reservation before = Reserve(second_);
  Pass(absl::Seconds(40));
  Pass(absl::Seconds(26));  // the end of both contests
  Join("third");
  absl::Notification contested;
  std::thread reopens;
  // The first one's contest has just ended, and the second one's is looked at next.
  state_.Once(first_, [&] {
    state_.Once(second_, [&] { contested.Notify(); });
    reopens = std::thread([&] { Reopen(second_); });
    // Or the call waits until all ends have been looked at.
    contested.WaitForNotificationWithTimeout(absl::Milliseconds(300));
  });
  registry_.Tick();
  ASSERT_TRUE(reopens.joinable());
  reopens.join();
  const Reservation after = Reserve(second_);
  EXPECT_NE(after.watermark_offset, before.watermark_offset);
  EXPECT_EQ(after.offsets[0], before.offsets[0]) << "full";
  EXPECT_NE(after.offsets[1], before.offsets[1]) << "both would write to it";
}

TEST_F(ContestEndsTest, WhereNobodyCanWriteAnyMoreNothingIsContested) {
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(first_);
  ASSERT_TRUE(registry_.sequences().Suspend(suspend).ok());  // for an hour
  const Reservation before = Reserve(first_);
  clock_.Advance(absl::Minutes(10));
  Join("second");
  Reopen(first_);
  EXPECT_EQ(Reserve(first_).offsets, before.offsets);
  EXPECT_EQ(store_.Stats().retiring_bytes, 0);
}

TEST_F(ContestEndsTest, WhatAContestNeedsOfAFullHostFinishedSequencesMakeRoomFor) {
  SequenceId finished = 0;
  for (int i = 0; store_.Stats().free_bytes > 0; ++i) {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("filler-", i), epoch_);
    request.set_prompt_tokens(0);
    const auto opened = registry_.Open(request);
    ASSERT_TRUE(opened.ok()) << opened.status();
    const int64_t free_pages = store_.Stats().free_bytes / 4096;
    if (free_pages < 4) continue;
    finished = opened->sequence_id();
    ASSERT_TRUE(store_
                    .Reserve({.sequence = finished,
                              .heads = {0, 2},
                              .num_pages = std::min<int64_t>(free_pages / 4, 8)},
                             /*direct=*/false)
                    .ok());
  }
  ASSERT_TRUE(registry_.ReportPlan(TestFinished(epoch_, finished, 1)).ok());
  Join("second");
  Reopen(second_);
  EXPECT_FALSE(registry_.sequences().FindOwner(finished).ok());
}

}  // namespace
}  // namespace heavywater
