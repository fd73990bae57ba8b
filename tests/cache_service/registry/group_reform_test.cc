// A group that has lost a rank forms again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cache_service/registry/group_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using GroupReformTest = GroupRegistryTest;

TEST_F(GroupReformTest, ARankThatHasLostItsPeersEndsTheFormationAndWaitsForThem) {
  const Epoch epoch = Form(3);
  v1::JoinRequest again = TestJoin(0, 3);
  again.set_failed_epoch(epoch);
  const PendingJoin first = Join(again);
  EXPECT_EQ(first->answers, 0);
  EXPECT_TRUE(absl::IsAborted(groups_.Renew("group", 1, epoch)));
  again = TestJoin(1, 3);
  again.set_failed_epoch(epoch);
  const PendingJoin second = Join(again);
  v1::JoinRequest replacement = TestJoin(2, 3);
  replacement.set_instance("another process");
  const PendingJoin third = Join(replacement);
  ASSERT_TRUE(first->ok() && second->ok() && third->ok());
  EXPECT_EQ(first->result->epoch(), epoch + 1);
}

TEST_F(GroupReformTest, AReplacedProcessThatWakesUpEndsNothing) {
  const Epoch epoch = Form(2);
  v1::JoinRequest again = TestJoin(0, 2);
  again.set_failed_epoch(epoch);
  Join(again);
  v1::JoinRequest replacement = TestJoin(1, 2);
  replacement.set_instance("another process");
  ASSERT_TRUE(Join(replacement)->ok());
  Pass(absl::Seconds(1));
  const PendingJoin woken = Join(TestJoin(1, 2));
  EXPECT_EQ(woken->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(woken->message(), HasSubstr("was replaced"));
  EXPECT_TRUE(groups_.Renew("group", 0, epoch + 1).ok());
}

TEST_F(GroupReformTest, ARankThatLostAnEarlierFormationGetsTheCurrentOne) {
  const Epoch epoch = Form(2);
  v1::JoinRequest again = TestJoin(0, 2);
  again.set_failed_epoch(epoch - 1);
  const PendingJoin join = Join(again);
  ASSERT_TRUE(join->ok());
  EXPECT_EQ(join->result->epoch(), epoch);
}

TEST_F(GroupReformTest, AnotherSizeIsRefusedNamingBothWhileMembersWaitForAMissingRank) {
  const Epoch epoch = Form(2);
  v1::JoinRequest again = TestJoin(0, 2);
  again.set_failed_epoch(epoch);
  const PendingJoin waiting = Join(again);
  for (const int rank : {0, 1, 2}) {
    v1::JoinRequest stray = TestJoin(rank, 3);
    stray.set_instance("stray");
    const PendingJoin refused = Join(stray);
    EXPECT_EQ(refused->code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(refused->message(), AllOf(HasSubstr("size"), HasSubstr("3"), HasSubstr("2")));
  }
  EXPECT_EQ(waiting->answers, 0);
}

TEST_F(GroupReformTest, AMemberThatWaitsForTheOthersStaysOne) {
  const Epoch epoch = Form(2);
  ASSERT_TRUE(groups_.SetDirect("group", 0, epoch).ok());
  v1::JoinRequest again = TestJoin(0, 2);
  again.set_failed_epoch(epoch);
  again.set_timeout_ms(60'000);
  const PendingJoin waiting = Join(again);
  for (int second = 0; second < 20; ++second) Pass(absl::Seconds(1));
  v1::JoinRequest replacement = TestJoin(1, 2);
  replacement.set_instance("another process");
  Join(replacement);
  ASSERT_TRUE(waiting->ok());
  EXPECT_TRUE(groups_.IsDirect("group", 0));
  EXPECT_EQ(groups_.MemberSince("group", 0), epoch);
  EXPECT_EQ(groups_.MemberSince("group", 1), epoch + 1);
}

}  // namespace
}  // namespace heavywater
