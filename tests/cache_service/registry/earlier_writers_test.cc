// Who may still write to a sequence's pages: processes that were replaced, ranks of an
// earlier incarnation, ranks of a suspended sequence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

constexpr int64_t kTokens = 24;
// A lease of a sequence, and the grace for a write that is under way.
constexpr absl::Duration kWriteEnd = absl::Seconds(60 + 5);

class EarlierWritersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    epoch_ = Join("first");
    opened_ = TestOpen("request", epoch_);
    id_ = registry_.Open(opened_)->sequence_id();
    first_watermark_ = Reserve();
    Report(1, 0, /*finished=*/false);
    ASSERT_EQ(registry_.sequences().Get(id_)->committed_tokens(), 0);  // no sets yet
  }
  Epoch Join(const std::string& instance) {
    Epoch epoch = 0;
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1, instance),
                            [&epoch](absl::StatusOr<v1::JoinResponse> joined) {
                              if (joined.ok()) epoch = joined->epoch();
                            });
    EXPECT_GT(epoch, 0u);
    EXPECT_TRUE(registry_.AttachDirect("group", 0, epoch).ok());
    return epoch;
  }
  // Pages that the rank fills in the slab; where its watermark is.
  int64_t Reserve() {
    int64_t watermark = 0;
    ReserveInto(&watermark);
    return watermark;
  }
  void ReserveInto(int64_t* watermark) {
    const auto direct = registry_.AdmitWriter(id_, 0, epoch_);
    ASSERT_TRUE(direct.ok() && *direct);
    const auto reserved =
        store_.Reserve({.sequence = id_, .heads = {0, 2}, .num_pages = 2}, *direct);
    ASSERT_TRUE(reserved.ok());
    *watermark = reserved->watermark_offset;
    store_.slab().Watermark(*watermark).store(kTokens);
  }
  void Report(int64_t plan, int32_t incarnation, bool finished) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id_, kTokens);
    v1::PlanReport& report = *request.mutable_reports(0);
    AddTestState(kTokens, report);
    report.set_plan(plan);
    report.set_incarnation(incarnation);
    report.set_finished(finished);
    const auto taken = registry_.ReportPlan(request);
    ASSERT_TRUE(taken.ok()) << taken.status();
  }
  int32_t Reopen() {
    v1::ReopenSequenceRequest request = TestReopen(opened_, id_, epoch_);
    request.set_max_tokens_seen(kTokens + 5);
    request.set_extends(true);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    const auto reopened = registry_.Reopen(request);
    EXPECT_TRUE(reopened.ok()) << reopened.status();
    return reopened.ok() ? reopened->incarnation() : -1;
  }
  void Close() {
    v1::CloseSequenceRequest close;
    close.set_sequence_id(id_);
    ASSERT_TRUE(registry_.sequences().Close(close).ok());
    registry_.Tick();
  }
  int64_t UsedBytes() const { return store_.Stats().used_bytes; }
  // Whether its pages may leave the slab: all ranks have stopped.
  bool MayLeave() {
    HostPageStore::Moves moves = store_.BeginMoves(0, 1 << 20);
    for (const PagePlace& place : moves.pages) store_.Settle(place.key);
    return !moves.pages.empty();
  }
  void Pass(absl::Duration duration) {
    clock_.Advance(duration);
    registry_.Tick();
  }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 40 * 4096)};
  Registry registry_{RegistryOptions(), store_, clock_};
  Epoch epoch_ = 0;
  v1::OpenSequenceRequest opened_;
  SequenceId id_ = 0;
  int64_t first_watermark_ = 0;
};

TEST_F(EarlierWritersTest, TheEndOfASuspendedSequenceFreesItsPagesWhenItsRanksMayWriteNoMore) {
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(id_);
  ASSERT_TRUE(registry_.sequences().Suspend(suspend).ok());  // for an hour
  // Its rank is never heard of again.
  Close();
  EXPECT_GT(UsedBytes(), 0);
  Pass(kWriteEnd - absl::Seconds(1));
  EXPECT_GT(UsedBytes(), 0);
  Pass(absl::Seconds(1));
  EXPECT_EQ(UsedBytes(), 0);
}

TEST_F(EarlierWritersTest, AProcessThatTookAnothersPlaceIsBelievedOnceThatOneMayWriteNoMore) {
  clock_.Advance(absl::Seconds(10));
  epoch_ = Join("second");  // the first one stands still
  const int32_t incarnation = Reopen();
  Reserve();
  clock_.Advance(absl::Seconds(20));
  Report(2, incarnation, /*finished=*/true);
  EXPECT_FALSE(MayLeave());
  // From when the first one's lease was given last.
  Pass(kWriteEnd - absl::Seconds(31));
  EXPECT_FALSE(MayLeave());
  Pass(absl::Seconds(1));
  EXPECT_TRUE(MayLeave());
}

TEST_F(EarlierWritersTest, WhoGoesOnByItselfIsBelievedAtOnce) {
  Report(2, 0, /*finished=*/true);
  EXPECT_TRUE(MayLeave());
  const int32_t incarnation = Reopen();
  Reserve();
  EXPECT_FALSE(MayLeave());
  Report(2, incarnation, /*finished=*/true);
  EXPECT_TRUE(MayLeave());
}

TEST_F(EarlierWritersTest, WhatHasGoneOnByThenIsNotStopped) {
  epoch_ = Join("second");
  const int32_t incarnation = Reopen();
  Reserve();
  Report(2, incarnation, /*finished=*/true);
  Reopen();
  Reserve();
  // The time of the first process, and no more of this one's lease than that.
  for (int i = 0; i < 7; ++i) {
    registry_.sequences().RenewOne(id_);
    Pass(absl::Seconds(10));
  }
  EXPECT_FALSE(MayLeave());
}

TEST_F(EarlierWritersTest, AProcessThatTookAnothersPlaceSharesNothingWithItThatBothMayWrite) {
  EXPECT_EQ(store_.Stats().retiring_bytes, 0);
  epoch_ = Join("second");  // the first one stands still
  Reopen();
  EXPECT_NE(Reserve(), first_watermark_);
  EXPECT_GT(store_.Stats().retiring_bytes, 0);
  // The first one wakes and goes on.
  store_.slab().Watermark(first_watermark_).store(kTokens + 5);
  EXPECT_EQ(store_.Watermark(id_, 0), kTokens);
  for (int i = 0; i < 6; ++i) {
    registry_.sequences().RenewOne(id_);
    EXPECT_GT(store_.Stats().retiring_bytes, 0);
    Pass(absl::Seconds(10));
  }
  registry_.sequences().RenewOne(id_);
  Pass(kWriteEnd - absl::Seconds(60));
  EXPECT_EQ(store_.Stats().retiring_bytes, 0);
}

TEST_F(EarlierWritersTest, WhoGoesOnByItselfKeepsItsPages) {
  Reopen();
  EXPECT_EQ(Reserve(), first_watermark_);
  EXPECT_EQ(store_.Stats().retiring_bytes, 0);
}

TEST_F(EarlierWritersTest, ALateWordOfAnEarlierIncarnationDoesNotFreeWhatThePresentOneWrites) {
  Reopen();
  Reserve();
  Close();
  Report(2, 0, /*finished=*/true);  // sent before it was reopened
  EXPECT_GT(UsedBytes(), 0);
  Report(2, 1, /*finished=*/true);
  EXPECT_EQ(UsedBytes(), 0);
}

TEST_F(EarlierWritersTest, AGroupThatIsNotThereYetIsAnotherTryAndNotALostSequence) {
  v1::ReopenSequenceRequest request = TestReopen(opened_, id_, epoch_);
  request.set_group("another");
  EXPECT_EQ(registry_.Reopen(request).status().code(), absl::StatusCode::kAborted);
}

TEST_F(EarlierWritersTest, AWriterWhoseGroupHasToJoinAnewIsToTryAgainAndNotToGiveItsPagesUp) {
  for (int i = 0; i < 3; ++i) {
    registry_.sequences().RenewOne(id_);
    Pass(absl::Seconds(6));  // more than a rank's lease
  }
  EXPECT_EQ(registry_.groups().num_groups(), 0);
  EXPECT_EQ(registry_.AdmitWriter(id_, 0, epoch_).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(registry_.AdmitWriter(id_ + 1, 0, epoch_).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace heavywater
