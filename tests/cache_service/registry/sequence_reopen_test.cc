// A group goes on with a sequence that a failure has cut off.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 2;
constexpr int64_t kTokens = 24;

class SequenceReopenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    epoch_ = Form("");
    open_ = TestOpen("request", epoch_);
    const auto opened = registry_.Open(open_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    id_ = opened->sequence_id();
  }
  // All ranks join, as other processes than before where `instance` differs.
  Epoch Form(const std::string& instance) {
    Epoch epoch = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      registry_.groups().Join(
          registry_.groups().NewTicket(),
          TestJoin(rank, kRanks, instance.empty() ? "" : absl::StrCat(instance, rank)),
          [&epoch](absl::StatusOr<v1::JoinResponse> joined) {
            if (joined.ok()) epoch = joined->epoch();
          });
    }
    return epoch;
  }
  v1::PlanReport Report(int64_t plan, const std::string& snapshot, int32_t incarnation = 0) {
    v1::PlanReport report;
    report.set_sequence_id(id_);
    report.set_plan(plan);
    report.set_tokens_seen(kTokens);
    report.set_watermark(kTokens);
    report.set_hash(1);
    report.set_incarnation(incarnation);
    report.mutable_snapshot()->set_data(snapshot);
    report.mutable_snapshot()->set_total_bytes(static_cast<int64_t>(snapshot.size()));
    return report;
  }
  void Send(int rank, v1::PlanReport report) {
    if (rank == 0) {
      for (int32_t token = 0; token < kTokens; ++token) report.add_tokens(100 + token);
    }
    v1::ReportPlanRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch_);
    *request.add_reports() = report;
    const auto sent = registry_.ReportPlan(request);
    ASSERT_TRUE(sent.ok()) << sent.status();
  }
  void SendSnapshots() {
    for (int rank = 0; rank < kRanks; ++rank) Send(rank, Report(1, absl::StrCat("part ", rank)));
  }
  v1::ReopenSequenceRequest Request() const {
    v1::ReopenSequenceRequest request = TestReopen(open_, id_, epoch_);
    request.set_max_tokens_seen(kTokens + 5);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    return request;
  }
  std::string Refusal(const v1::ReopenSequenceRequest& request,
                      absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
    const auto reopened = registry_.Reopen(request);
    EXPECT_EQ(reopened.status().code(), code);
    return std::string(reopened.status().message());
  }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 100 * 4096)};
  Registry registry_{RegistryOptions{.max_snapshot_bytes = 100}, store_, clock_};
  Epoch epoch_ = 0;
  v1::OpenSequenceRequest open_;
  SequenceId id_ = 0;
};

TEST_F(SequenceReopenTest, OtherProcessesGetTheCommittedStateOfEachRank) {
  SendSnapshots();
  epoch_ = Form("replacement");
  const auto reopened = registry_.Reopen(Request());
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->plan(), 1);
  EXPECT_EQ(reopened->tokens_seen(), kTokens);
  EXPECT_EQ(reopened->incarnation(), 1);
  v1::ReadSnapshotRequest read;
  read.set_sequence_id(id_);
  read.set_plan(1);
  read.set_rank(1);
  read.set_offset(2);
  const auto part = registry_.sequences().ReadSnapshot(read);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->data(), "rt 1");
  EXPECT_EQ(part->total_bytes(), 6);
}

TEST_F(SequenceReopenTest, WithoutACommittedStateInReachItIsRefused) {
  const auto lost = absl::StatusCode::kDataLoss;
  EXPECT_THAT(Refusal(Request(), lost), HasSubstr("no committed state"));
  Send(0, Report(1, "part"));
  EXPECT_THAT(Refusal(Request(), lost), HasSubstr("no committed state"));
  Send(1, Report(1, "part"));
  v1::ReopenSequenceRequest early = Request();
  early.set_max_tokens_seen(kTokens - 1);
  EXPECT_THAT(Refusal(early, lost), HasSubstr(absl::StrCat(kTokens - 1)));
  EXPECT_TRUE(registry_.Reopen(Request()).ok());
}

TEST_F(SequenceReopenTest, AnotherTenantsIsAsIfItWereNotThere) {
  SendSnapshots();
  v1::ReopenSequenceRequest other = Request();
  other.set_tenant("somebody else");
  const absl::Status refused = registry_.Reopen(other).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  other.set_sequence_id(other.sequence_id() + 1);
  EXPECT_EQ(registry_.Reopen(other).status().code(), refused.code());
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("tenant")));
}

TEST_F(SequenceReopenTest, WhatDiffersFromTheSequenceIsNamedWithBothValues) {
  SendSnapshots();
  v1::ReopenSequenceRequest other = Request();
  other.set_max_tokens(999);
  EXPECT_THAT(Refusal(other), AllOf(HasSubstr("max_tokens"), HasSubstr("999"), HasSubstr("1000")));
  other = Request();
  other.mutable_policy()->set_decay(0.5);
  EXPECT_THAT(Refusal(other), HasSubstr("policy"));
  other = Request();
  other.set_tokens(7, 1);
  EXPECT_THAT(Refusal(other), AllOf(HasSubstr("tokens[7]"), HasSubstr("107")));
}

TEST_F(SequenceReopenTest, WhatAnEarlierBuildDidNotKnowMaySayItsDefault) {
  SendSnapshots();
  v1::ReopenSequenceRequest other = Request();
  other.mutable_policy()->set_recall_wait(true);
  EXPECT_THAT(Refusal(other), HasSubstr("recall_wait: true"));
  other.mutable_policy()->set_recall_wait(false);
  EXPECT_TRUE(registry_.Reopen(other).ok());
}

TEST_F(SequenceReopenTest, AStaleEpochAndAnUnknownSequenceAreTold) {
  SendSnapshots();
  v1::ReopenSequenceRequest stale = Request();
  stale.set_epoch(epoch_ + 1);
  EXPECT_EQ(registry_.Reopen(stale).status().code(), absl::StatusCode::kAborted);
  v1::ReopenSequenceRequest unknown = Request();
  unknown.set_sequence_id(id_ + 1);
  EXPECT_EQ(registry_.Reopen(unknown).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SequenceReopenTest, LateReportsOfTheEarlierIncarnationAreIgnored) {
  SendSnapshots();
  ASSERT_TRUE(registry_.Reopen(Request()).ok());
  for (int rank = 0; rank < kRanks; ++rank) {
    v1::PlanReport late = Report(2, "late");
    late.set_finished(true);
    Send(rank, late);
  }
  EXPECT_FALSE(registry_.sequences().Get(id_)->finished());
  for (int rank = 0; rank < kRanks; ++rank) {
    v1::PlanReport last = Report(2, "own", /*incarnation=*/1);
    last.set_finished(true);
    Send(rank, last);
  }
  EXPECT_TRUE(registry_.sequences().Get(id_)->finished());
}

TEST_F(SequenceReopenTest, BeyondTheBoundTheOldestStatesOfAllSequencesAreDropped) {
  SendSnapshots();
  const SequenceId first = id_;
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), 12);
  open_ = TestOpen("second", epoch_);
  const auto opened = registry_.Open(open_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  id_ = opened->sequence_id();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, Report(1, std::string(45, 'x')));
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), 90);
  EXPECT_TRUE(registry_.Reopen(Request()).ok());
  id_ = first;
  EXPECT_THAT(Refusal(Request(), absl::StatusCode::kDataLoss), HasSubstr("no committed state"));
  // The ended hold nothing.
  v1::CloseSequenceRequest close;
  close.set_sequence_id(opened->sequence_id());
  close.set_request_id("close");
  ASSERT_TRUE(registry_.sequences().Close(close).ok());
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), 0);
}

TEST_F(SequenceReopenTest, BeyondTheBoundStatesOfSuspendedSequencesAreDroppedLast) {
  SendSnapshots();
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(id_);
  ASSERT_TRUE(registry_.sequences().Suspend(suspend).ok());
  const v1::ReopenSequenceRequest first = Request();
  open_ = TestOpen("second", epoch_);
  id_ = registry_.Open(open_)->sequence_id();
  for (int rank = 0; rank < kRanks; ++rank) Send(rank, Report(1, std::string(45, 'x')));
  EXPECT_THAT(Refusal(Request(), absl::StatusCode::kDataLoss), HasSubstr("no committed state"));
  EXPECT_TRUE(registry_.Reopen(first).ok());
}

TEST_F(SequenceReopenTest, ReopeningRenewsTheLease) {
  SendSnapshots();
  clock_.Advance(absl::Seconds(50));
  epoch_ = Form("replacement");
  ASSERT_TRUE(registry_.Reopen(Request()).ok());
  clock_.Advance(absl::Seconds(50));
  registry_.Tick();
  EXPECT_TRUE(registry_.sequences().Get(id_).ok());
}

}  // namespace
}  // namespace heavywater
