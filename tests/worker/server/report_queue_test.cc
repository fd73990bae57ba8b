#include "worker/server/report_queue.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kPlenty = 1 << 20;

QueuedReport Report(SequenceId sequence, int64_t plan, bool keep = false) {
  QueuedReport queued;
  queued.report.set_sequence_id(sequence);
  queued.report.set_plan(plan);
  queued.report.set_tokens_seen(100 + plan);
  queued.report.set_first_token(plan);
  queued.report.add_tokens(static_cast<int32_t>(plan));
  queued.keep = keep;
  return queued;
}

QueuedReport ReportOf(int32_t incarnation, int64_t plan, bool keep = false) {
  QueuedReport queued = Report(7, plan, keep);
  queued.report.set_incarnation(incarnation);
  return queued;
}

std::string Plans(ReportQueue& queue) {
  std::string plans;
  for (const v1::PlanReport& report : queue.Peek(kPlenty)) {
    plans += std::to_string(report.sequence_id()) + ":" + std::to_string(report.plan()) + " ";
  }
  return plans;
}

TEST(ReportQueueTest, ALaterPlanTakesTheTokensOfAnEarlierOneAlong) {
  ReportQueue queue(10, kPlenty);
  for (int64_t plan : {1, 2, 3}) queue.Push(Report(7, plan));
  const auto batch = queue.Peek(kPlenty);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].plan(), 3);
  EXPECT_EQ(batch[0].tokens_seen(), 103);
  EXPECT_EQ(batch[0].first_token(), 1);
  EXPECT_THAT(batch[0].tokens(), ElementsAre(1, 2, 3));
  EXPECT_EQ(queue.dropped(), 0);
}

TEST(ReportQueueTest, PlansWithSetsStayReportsOfTheirOwnAndOthersKeepTheirOrder) {
  ReportQueue queue(10, kPlenty);
  queue.Push(Report(7, 1, true));
  queue.Push(Report(8, 1, true));
  queue.Push(Report(7, 2));
  queue.Push(Report(7, 3, true));
  queue.Push(Report(7, 4));
  queue.Push(Report(8, 2));
  EXPECT_EQ(Plans(queue), "7:1 8:1 7:3 7:4 8:2 ");
}

TEST(ReportQueueTest, WhatIsOnItsWayDoesNotChange) {
  ReportQueue queue(10, kPlenty);
  queue.Push(Report(7, 1));
  ASSERT_EQ(queue.Peek(kPlenty).size(), 1u);
  queue.Push(Report(7, 2));
  queue.Push(Report(7, 3));
  queue.Pop(1);
  const auto batch = queue.Peek(kPlenty);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].first_token(), 2);
  EXPECT_THAT(batch[0].tokens(), ElementsAre(2, 3));
}

TEST(ReportQueueTest, OverTheBoundKeptReportsGoIntoTheirSuccessorsAndAreCounted) {
  ReportQueue queue(3, kPlenty);
  for (int64_t plan = 1; plan <= 5; ++plan) queue.Push(Report(7, plan, true));
  EXPECT_EQ(queue.size(), 3u);
  EXPECT_EQ(queue.dropped(), 2);
  const auto batch = queue.Peek(kPlenty);
  EXPECT_EQ(batch[0].plan(), 3);
  EXPECT_THAT(batch[0].tokens(), ElementsAre(1, 2, 3));  // no token is lost
}

TEST(ReportQueueTest, BytesAreBoundedAndBalance) {
  ReportQueue queue(1000, 200);
  for (SequenceId sequence = 1; sequence <= 100; ++sequence) queue.Push(Report(sequence, 1, true));
  EXPECT_LE(queue.bytes(), 200);
  EXPECT_GT(queue.dropped(), 0);
  while (queue.size() > 0) queue.Pop(queue.Peek(1).size());
  EXPECT_EQ(queue.bytes(), 0);
}

TEST(ReportQueueTest, FinishedIsNeverMergedAway) {
  ReportQueue queue(10, kPlenty);
  QueuedReport last = Report(7, 2);
  last.report.set_finished(true);
  queue.Push(last);
  queue.Push(Report(7, 3));
  EXPECT_TRUE(queue.Peek(kPlenty)[0].finished());
}

TEST(ReportQueueTest, AnEarlierIncarnationIsDroppedNotMergedIntoTheOneThatGoesOn) {
  ReportQueue queue(10, kPlenty);
  queue.Push(ReportOf(1, 4, /*keep=*/true));
  QueuedReport last = ReportOf(1, 5);
  last.report.set_finished(true);
  queue.Push(last);
  queue.Push(Report(8, 1));
  queue.Push(ReportOf(2, 3));
  EXPECT_EQ(Plans(queue), "8:1 7:3 ");
  EXPECT_EQ(queue.dropped(), 2);
  const v1::PlanReport live = queue.Peek(kPlenty)[1];
  EXPECT_FALSE(live.finished());
  EXPECT_EQ(live.first_token(), 3);
  EXPECT_THAT(live.tokens(), ElementsAre(3));
}

TEST(ReportQueueTest, OverTheBoundReportsOfTwoIncarnationsStayApart) {
  ReportQueue queue(1, kPlenty);
  queue.Push(ReportOf(2, 6));
  queue.Push(ReportOf(1, 5));  // late, from a process that was replaced
  const auto batch = queue.Peek(kPlenty);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].incarnation(), 1);
  EXPECT_THAT(batch[0].tokens(), ElementsAre(5));
}

}  // namespace
}  // namespace heavywater
