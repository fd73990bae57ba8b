// Sequences that are kept without being on a device, and go on with more tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/slab_view.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 24;

class SequenceSuspendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok());
                              epoch_ = joined->epoch();
                            });
    id_ = Open("request");
  }
  SequenceId Open(const std::string& request_id) {
    const auto opened = registry_.Open(TestOpen(request_id, epoch_));
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->sequence_id() : 0;
  }
  void Report(SequenceId id) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id, kTokens);
    AddTestState(kTokens, *request.mutable_reports(0));
    ASSERT_TRUE(registry_.ReportPlan(request).ok());
  }
  absl::StatusOr<v1::SuspendSequenceResponse> Suspend(SequenceId id, int64_t ttl_ms) {
    v1::SuspendSequenceRequest request;
    request.set_sequence_id(id);
    request.set_ttl_ms(ttl_ms);
    return registry_.sequences().Suspend(request);
  }
  v1::ReopenSequenceRequest MoreTokens(int64_t max_tokens) const {
    v1::ReopenSequenceRequest request = TestReopen(TestOpen("request", epoch_), id_, epoch_);
    request.set_max_tokens(max_tokens);
    request.set_max_tokens_seen(kTokens + 5);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    return request;
  }
  absl::StatusOr<v1::HeartbeatResponse> Heartbeat() {
    v1::HeartbeatRequest request;
    request.set_group("group");
    request.set_epoch(epoch_);
    request.add_sequence_ids(id_);
    return registry_.Heartbeat(request);
  }
  bool Exists(SequenceId id) { return registry_.sequences().Get(id).ok(); }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 40 * 4096)};
  Registry registry_{RegistryOptions(), store_, clock_};
  Epoch epoch_ = 0;
  SequenceId id_ = 0;
};

TEST_F(SequenceSuspendTest, OutlivesItsLeaseAndNotItsTime) {
  Report(id_);
  const auto suspended = Suspend(id_, 300'000);
  ASSERT_TRUE(suspended.ok()) << suspended.status();
  EXPECT_EQ(suspended->tokens_seen(), kTokens);
  clock_.Advance(absl::Seconds(299));
  registry_.Tick();
  EXPECT_TRUE(Exists(id_));
  clock_.Advance(absl::Seconds(2));
  registry_.Tick();
  EXPECT_FALSE(Exists(id_));
}

TEST_F(SequenceSuspendTest, AnOrdinaryRenewalDoesNotShortenItsTime) {
  Report(id_);
  ASSERT_TRUE(Suspend(id_, 300'000).ok());
  registry_.sequences().RenewOne(id_);
  clock_.Advance(absl::Seconds(200));
  registry_.Tick();
  EXPECT_TRUE(Exists(id_));
}

TEST_F(SequenceSuspendTest, ResumedItHasItsOrdinaryLease) {
  Report(id_);
  ASSERT_TRUE(Suspend(id_, 300'000).ok());
  v1::ResumeSequenceRequest resume;
  resume.set_sequence_id(id_);
  const auto resumed = registry_.sequences().Resume(resume);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->lease_ms(), 60'000);
  EXPECT_FALSE(registry_.sequences().Get(id_)->suspended());
  clock_.Advance(absl::Seconds(61));
  registry_.Tick();
  EXPECT_FALSE(Exists(id_));
}

TEST_F(SequenceSuspendTest, WithoutACommittedStateOrForTooLongItIsRefused) {
  const auto early = Suspend(id_, 0);
  EXPECT_EQ(early.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(early.status().message()), HasSubstr("no committed state"));
  Report(id_);
  const auto forever = Suspend(id_, 3'600'001);
  EXPECT_EQ(forever.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(forever.status().message()), HasSubstr("ttl_ms is 3600001"));
  EXPECT_EQ(Suspend(id_ + 1, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SequenceSuspendTest, ItIsNotEndedToMakeRoomForOthers) {
  const SequenceId other = Open("other");
  for (const SequenceId id : {id_, other}) {
    Report(id);
    ASSERT_TRUE(store_.Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 2}, false).ok());
  }
  ASSERT_TRUE(Suspend(id_, 0).ok());
  v1::OpenSequenceRequest large = TestOpen("large", epoch_);
  large.set_prompt_tokens(16 * 7);
  ASSERT_TRUE(registry_.Open(large).ok());
  EXPECT_FALSE(Exists(other)) << "it was not needed after all";
  EXPECT_TRUE(Exists(id_));
}

TEST_F(SequenceSuspendTest, HeartbeatsSayThatItIsToLeaveTheDevice) {
  Report(id_);
  EXPECT_EQ(Heartbeat()->suspended_sequence_ids_size(), 0);
  ASSERT_TRUE(Suspend(id_, 0).ok());
  EXPECT_THAT(Heartbeat()->suspended_sequence_ids(), ElementsAre(id_));
}

TEST_F(SequenceSuspendTest, ATurnOnPagesThatHaveChangedInTheSlabIsDataLoss) {
  const auto reserved = store_.Reserve({.sequence = id_, .heads = {0, 2}, .num_pages = 2}, true);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  PublishWatermark(store_.slab().Watermark(reserved->watermark_offset), kTokens);
  Report(id_);
  ASSERT_TRUE(Suspend(id_, 0).ok());
  registry_.sequences().SealPages(id_);
  ASSERT_TRUE(registry_.Reopen(MoreTokens(1000)).ok());
  v1::ReportPlanRequest again = TestFinished(epoch_, id_, kTokens);
  again.mutable_reports(0)->set_plan(2);
  again.mutable_reports(0)->set_incarnation(1);
  AddTestState(kTokens, *again.mutable_reports(0));
  again.mutable_reports(0)->clear_tokens();
  ASSERT_TRUE(registry_.ReportPlan(again).ok());
  *store_.slab().At(reserved->offsets[2]) ^= std::byte{1};
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = registry_.Reopen(MoreTokens(1000)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("page 0 of sequence 1, layer 0, kv_head 1: checksum is"));
  }
}

TEST_F(SequenceSuspendTest, ATurnMayTakeMoreTokensThanItWasOpenedFor) {
  Report(id_);
  ASSERT_TRUE(Suspend(id_, 0).ok());
  v1::ReopenSequenceRequest more = MoreTokens(3000);
  EXPECT_EQ(registry_.Reopen(more).status().code(), absl::StatusCode::kFailedPrecondition);
  more.set_extends(true);
  const auto reopened = registry_.Reopen(more);
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_FALSE(registry_.sequences().Get(id_)->suspended());
  // Beyond its first 1000: pages, and reports.
  EXPECT_TRUE(
      store_.Reserve({.sequence = id_, .heads = {0, 1}, .first_page = 100, .num_pages = 1}, false)
          .ok());
  v1::ReportPlanRequest report = TestFinished(epoch_, id_, 2500);
  report.mutable_reports(0)->set_plan(2);
  report.mutable_reports(0)->set_incarnation(reopened->incarnation());
  EXPECT_TRUE(registry_.ReportPlan(report).ok());
  more.set_max_tokens(500);
  EXPECT_TRUE(registry_.Reopen(more).ok());
  EXPECT_TRUE(
      store_.Reserve({.sequence = id_, .heads = {1, 1}, .first_page = 101, .num_pages = 1}, false)
          .ok())
      << "it never takes fewer";
}

TEST_F(SequenceSuspendTest, ATurnTakesInAgainWhatWasGivenUpBehindItsState) {
  const auto reserved = store_.Reserve({.sequence = id_, .heads = {0, 2}, .num_pages = 2}, true);
  ASSERT_TRUE(reserved.ok());
  ASSERT_TRUE(store_.Skip(id_, 0, 2, 1).ok());  // it found no room
  store_.slab().Watermark(reserved->watermark_offset).store(40);
  Report(id_);
  v1::ReportPlanRequest more = TestFinished(epoch_, id_, 40);
  v1::PlanReport& report = *more.mutable_reports(0);
  report.set_plan(2);
  report.set_watermark(40);
  report.add_dropped_ranges(32);
  report.add_dropped_ranges(40);
  report.set_first_token(kTokens);
  for (int32_t token = kTokens; token < 40; ++token) report.add_tokens(100 + token);
  ASSERT_TRUE(registry_.ReportPlan(more).ok());
  v1::ReopenSequenceRequest turn = MoreTokens(1000);
  for (int32_t token = kTokens; token < 45; ++token) turn.add_tokens(100 + token);
  turn.set_max_tokens_seen(44);
  turn.set_extends(true);
  const auto reopened = registry_.Reopen(turn);
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->tokens_seen(), kTokens);
  EXPECT_EQ(reopened->known_tokens(), 32) << "the rest comes again";
  const auto page =
      store_.Reserve({.sequence = id_, .heads = {0, 2}, .first_page = 2, .num_pages = 1}, false);
  EXPECT_TRUE(page.ok()) << page.status();
}

}  // namespace
}  // namespace heavywater
