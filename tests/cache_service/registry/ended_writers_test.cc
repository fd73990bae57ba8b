// When the pages of an ended sequence are given to others: once nobody writes them any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/cache_service/registry/registry_fixture.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;

class EndedWritersTest : public RegistryFixture {};

TEST_F(EndedWritersTest, PagesInTheSlabWaitForTheirWriterToHearOfTheEnd) {
  ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  const SequenceId id = Open("request");
  EXPECT_EQ(*registry_.CheckWriter(id, 0, epoch_), true);
  EXPECT_EQ(*registry_.CheckWriter(id, 1, epoch_), false);
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  ASSERT_TRUE(Close(id).ok());
  EXPECT_GT(store_.Stats().retiring_bytes, 0);
  ASSERT_TRUE(Heartbeat(1, {}).ok());
  EXPECT_THAT(Heartbeat(0, {id})->unknown_sequence_ids(), ElementsAre(id));
  EXPECT_GT(store_.Stats().retiring_bytes, 0) << "now the rank knows; it may be writing still";
  ASSERT_TRUE(Heartbeat(0, {}).ok());
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

// Whoever asked for the pages has given up, and ended the text, by the time there is room.
TEST_F(EndedWritersTest, AReservationThatComesAfterItsRanksEndMakesItNoWriterAgain) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 1, /*direct=*/true).ok());
  registry_.StopIfFinished(id, 0);
  EXPECT_TRUE(store_.HasWriters(id)) << "it goes on";
  ASSERT_TRUE(registry_.ReportPlan(TestFinished(epoch_, id, 16)).ok());
  EXPECT_FALSE(store_.HasWriters(id));
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  registry_.StopIfFinished(id, 1);
  EXPECT_TRUE(store_.HasWriters(id));
  registry_.StopIfFinished(id, 0);
  EXPECT_FALSE(store_.HasWriters(id));
}

TEST_F(EndedWritersTest, AHeartbeatThatWasUnderWayBeforeTheEndStopsNoWriter) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  ASSERT_TRUE(Close(id).ok());
  ASSERT_TRUE(Heartbeat(0, {}).ok());  // built before the rank opened the sequence
  EXPECT_GT(store_.Stats().retiring_bytes, 0);
  ASSERT_TRUE(Heartbeat(0, {}).ok());
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

// A heartbeat that its rank gave up after a while may come after the next one.
TEST_F(EndedWritersTest, HeartbeatsSentBeforeTheEndStopNoWriterHoweverManyThereAre) {
  ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  v1::HeartbeatRequest request;
  request.set_group("group");
  request.set_rank(0);
  request.set_epoch(epoch_);
  request.set_answered_number(0);
  const auto before = registry_.Heartbeat(request);
  ASSERT_TRUE(before.ok()) << before.status();
  const SequenceId id = Open("late");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  ASSERT_TRUE(Close(id).ok());
  std::vector<uint64_t> answers;
  for (const uint64_t answered : {uint64_t{0}, before->number(), uint64_t{1} << 63}) {
    request.set_answered_number(answered);
    const auto late = registry_.Heartbeat(request);
    ASSERT_TRUE(late.ok()) << late.status();
    answers.push_back(late->number());
    EXPECT_GT(store_.Stats().used_bytes, 0) << answered;
  }
  request.set_answered_number(answers.front());
  ASSERT_TRUE(registry_.Heartbeat(request).ok());
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

// The first one may live on, cut off, and write until its own clock stops it.
TEST_F(EndedWritersTest, ASecondProcessOfARankDoesNotSpeakForTheFirst) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  for (int rank = 0; rank < kRanks; ++rank) {
    registry_.groups().Join(registry_.groups().NewTicket(),
                            TestJoin(rank, kRanks, rank == 0 ? "second process" : ""),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok()) << joined.status();
                              epoch_ = joined->epoch();
                            });
  }
  ASSERT_TRUE(Close(id).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Heartbeat(0, {}).ok());
  EXPECT_GT(store_.Stats().retiring_bytes, 0);
  PassWithHeartbeats(absl::Seconds(66), {});
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

TEST_F(EndedWritersTest, AnotherGroupCannotSayThatAWriterHasStopped) {
  ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  ASSERT_TRUE(Close(id).ok());
  v1::JoinRequest join = TestJoin(0, 1);
  join.set_group("another");
  v1::ReportPlanRequest report = Report(0, id, 1, 9);
  registry_.groups().Join(registry_.groups().NewTicket(), join,
                          [&report](absl::StatusOr<v1::JoinResponse> joined) {
                            ASSERT_TRUE(joined.ok()) << joined.status();
                            report.set_epoch(joined->epoch());
                          });
  report.set_group("another");
  report.mutable_reports(0)->set_finished(true);
  registry_.ReportPlan(report).status().IgnoreError();
  EXPECT_GT(store_.Stats().retiring_bytes, 0) << "its own rank may be writing still";
  report.set_group("group");
  report.set_epoch(epoch_);
  registry_.ReportPlan(report).status().IgnoreError();
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

// The rank may be alive, decoding, and out of reach: until one lease after its last
// heartbeat it writes, and then what it was just writing needs its time.
TEST_F(EndedWritersTest, PagesOfASilentWriterAreReclaimedWhenTheLeaseAsGivenAndTheGraceAreOver) {
  ASSERT_TRUE(registry_.AttachDirect("group", 0, epoch_).ok());
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  Pass(absl::Seconds(3));
  ASSERT_TRUE(Heartbeat(0, {id}).ok());
  ASSERT_TRUE(Close(id).ok());
  Pass(absl::ZeroDuration());
  Pass(absl::Seconds(60 + 4));
  EXPECT_GT(store_.Stats().used_bytes, 0);
  Pass(absl::Seconds(1));
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

TEST_F(EndedWritersTest, PagesOfASilentWriterOutliveTheLeaseByTheGrace) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  Pass(absl::Seconds(60));
  EXPECT_EQ(registry_.sequences().Get(id).status().code(), absl::StatusCode::kNotFound);
  Pass(absl::Seconds(4));
  EXPECT_GT(store_.Stats().used_bytes, 0);
  Pass(absl::Seconds(1));
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

TEST_F(EndedWritersTest, ARankThatGetsPagesRenewsTheLease) {
  const SequenceId id = Open("request");
  Pass(absl::Seconds(4));
  ASSERT_TRUE(registry_.AdmitWriter(id, 0, epoch_).ok());
  EXPECT_EQ(registry_.sequences().Get(id)->lease_remaining_ms(), 60'000);
  Pass(absl::Milliseconds(500));
  EXPECT_EQ(registry_.AdmitWriter(id, 0, epoch_ + 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(registry_.sequences().Get(id)->lease_remaining_ms(), 59'500);
}

TEST_F(EndedWritersTest, AFinishedWriterHoldsNothingBack) {
  const SequenceId id = Open("request");
  ASSERT_TRUE(Reserve(id, 0, 2, /*direct=*/true).ok());
  v1::ReportPlanRequest request = Report(0, id, 1, 9);
  request.mutable_reports(0)->set_finished(true);
  ASSERT_TRUE(registry_.ReportPlan(request).ok());
  ASSERT_TRUE(Close(id).ok());
  EXPECT_EQ(store_.Stats().used_bytes, 0);
}

}  // namespace
}  // namespace heavywater
