// Tiers below that refuse, are away, or give back other bytes.
#include <gmock/gmock.h>

#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using TierFaultsTest = OrderedStoreFixture;

TEST_F(TierFaultsTest, ARefusedPageStaysWhereItWasAndIsCountedAndTriedAgain) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  disk_->LimitPuts(3);
  remote_->SetReachable(false);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 5 * kTestPageBytes) << "three of four went";
  EXPECT_EQ(Disk().pages, 3);
  EXPECT_EQ(Disk().failures.full, 1);
  ExpectAllRows(1, 32);
  ExpectBalanced();
  disk_->LimitPuts(1000);
  EXPECT_FALSE(store_->Turn()) << "the tier is left alone for a while";
  clock_.Advance(absl::Seconds(2));
  TurnUntilIdle();
  EXPECT_LE(store_->Stats().used_bytes, 10 * kTestPageBytes);
  ExpectAllRows(1, 32);
  ExpectAllRows(2, 32);
}

TEST_F(TierFaultsTest, WhatATierRefusesGoesToTheNextOne) {
  Make(20);
  disk_->SetReachable(false);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  EXPECT_EQ(Disk().pages, 0);
  EXPECT_GT(Disk().failures.unavailable, 0);
  EXPECT_GT(Remote().moved_in, 0);
  EXPECT_LE(store_->Stats().used_bytes, 10 * kTestPageBytes) << "the slab has room";
  ExpectAllRows(1, 32);
  ExpectAllRows(2, 32);
  disk_->SetReachable(true);
  clock_.Advance(absl::Seconds(2));
  WriteAndFinish(3, 32);
  TurnUntilIdle();
  EXPECT_GT(Disk().moved_in, 0) << "it is asked again";
  ExpectAllRows(3, 32);
  ExpectBalanced();
}

TEST_F(TierFaultsTest, ATierThatBeginsAndCeasesToRefuseIsToldOnce) {
  Make(20);
  remote_->SetReachable(false);
  disk_->SetReachable(false);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  for (int i = 0; i < 3; ++i) {
    TurnUntilIdle();
    clock_.Advance(absl::Seconds(2));
  }
  EXPECT_THAT(changes_, ::testing::ElementsAre("disk UNAVAILABLE", "remote UNAVAILABLE"));
  disk_->SetReachable(true);
  TurnUntilIdle();
  EXPECT_THAT(changes_,
              ::testing::ElementsAre("disk UNAVAILABLE", "remote UNAVAILABLE", "disk OK"));
}

TEST_F(TierFaultsTest, ATierThatIsAwayHoldsNothingUpAndItsPagesAreUnavailable) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  disk_->SetReachable(false);
  EXPECT_EQ(ReadPage(1, 0).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Disk().failures.unavailable, 1);
  WriteAndFinish(3, 32);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(3), 8 * kTestPageBytes);
  ExpectAllRows(3, 32);
  disk_->SetReachable(true);
  EXPECT_TRUE(ReadPage(1, 0).ok());
}

TEST_F(TierFaultsTest, ADamagedPageIsDataLossAndALostOneAMissForItselfOnly) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_TRUE(disk_->Damage(Key(1, 0, 1, 1)));
  ASSERT_TRUE(disk_->Lose(Key(1, 1, 0, 1)));
  EXPECT_EQ(ReadPage(1, 0, 1, 1).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadPage(1, 1, 0, 1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Disk().failures.corrupt, 1);
  EXPECT_EQ(Disk().failures.missing, 1);
  EXPECT_TRUE(ReadPage(1, 1, 1, 1).ok());
  EXPECT_TRUE(ReadPage(1, 0, 0, 1).ok());
}

TEST_F(TierFaultsTest, ADamagedPageIsNotPassedOnAndDoesNotHoldOthersBack) {
  Make(20, /*disk_pages=*/12);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_TRUE(disk_->Damage(Key(1, 0)) || remote_->Damage(Key(1, 0)));
  WriteAndFinish(3, 32);
  WriteAndFinish(4, 8);
  TurnUntilIdle();
  ExpectAllRows(3, 32);
  ExpectAllRows(2, 32);
  EXPECT_EQ(ReadPage(1, 0).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(ReadPage(1, 1).ok());
}

}  // namespace
}  // namespace heavywater
