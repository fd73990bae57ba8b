// Sequences whose ranks go on: their pages come up.
#include <gmock/gmock.h>

#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

using BringUpTest = OrderedStoreFixture;

TEST_F(BringUpTest, ASequenceIsBroughtUpWholeForItsRanks) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  ASSERT_TRUE(ReadPage(2, 0).ok());
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  ExpectAllRows(1, 32);
  ExpectBalanced();
  EXPECT_EQ(store_->BringUp(9).code(), absl::StatusCode::kNotFound);
}

TEST_F(BringUpTest, OthersMakeRoomForOneThatIsBroughtUp) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  ASSERT_TRUE(ReadPage(2, 0).ok());
  TurnUntilIdle();
  WriteAndFinish(3, 16);
  WriteAndFinish(4, 16);  // 17 to 18 of 20 pages
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  ExpectAllRows(1, 32);
  ExpectAllRows(2, 32);
  ExpectBalanced();
}

TEST_F(BringUpTest, OneThatFindsNoRoomOrNoTierIsNotLost) {
  Make(20);
  WriteAndFinish(1, 32);
  ASSERT_TRUE(Write(2, 32).ok());  // its rank goes on writing
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  disk_->SetReachable(false);
  EXPECT_EQ(store_->BringUp(1).code(), absl::StatusCode::kUnavailable);
  disk_->SetReachable(true);
  ASSERT_TRUE(Write(3, 32).ok());  // 19 of 20 pages
  const absl::Status full = store_->BringUp(1);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("sequence 1"));
  ExpectAllRows(1, 32);
  store_->StopWriter(3, 0);
  EXPECT_TRUE(store_->BringUp(1).ok()) << "now others can go down";
  ExpectBalanced();
}

TEST_F(BringUpTest, ATruncatedSequenceWhosePagesLieBelowIsWrittenAnewOnceItIsUp) {
  Make(20);
  WriteAndFinish(1, 40);
  WriteAndFinish(2, 16);
  ASSERT_TRUE(ReadPage(2, 0).ok());
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  ASSERT_TRUE(store_->Truncate(1, 20).ok());
  EXPECT_EQ(ReadPage(1, 1).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(ReadPage(1, 1, 0, 0, 4).ok());
  ASSERT_TRUE(store_->BringUp(1).ok());
  ASSERT_TRUE(store_->Truncate(1, 20).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes) << "the third page of each is free";
  EXPECT_EQ(store_->SequenceBytes(1), 8 * kTestPageBytes);
  ExpectBalanced();
  EXPECT_TRUE(store_->Release(1).ok());
  EXPECT_TRUE(store_->Release(2).ok());
  TurnUntilIdle();
  ExpectBalanced();
}

}  // namespace
}  // namespace heavywater
