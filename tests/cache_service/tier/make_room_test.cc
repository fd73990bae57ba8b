// A reservation that finds the slab full.
#include <gmock/gmock.h>

#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

class MakeRoomTest : public OrderedStoreFixture {
 protected:
  absl::Status Reserve(SequenceId sequence, int64_t num_pages) {
    return store_->Reserve({.sequence = sequence, .heads = {0, 2}, .num_pages = num_pages}, false)
        .status();
  }
};

TEST_F(MakeRoomTest, ARefusedReservationFindsRoomOnceFinishedPagesHaveMovedDown) {
  Make(20);
  WriteAndFinish(1, 32);
  ASSERT_TRUE(Write(3, 16).ok());
  const absl::Status full = Reserve(3, 3);
  ASSERT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(store_->MakeRoom(full).ok());
  EXPECT_EQ(store_->HostBytes(1), 4 * kTestPageBytes) << "as far as that needs";
  EXPECT_TRUE(Reserve(3, 3).ok());
  ExpectAllRows(1, 32);
}

TEST_F(MakeRoomTest, WhatCannotMoveIsRefusedAtOnceAsItWas) {
  Make(20, /*disk_pages=*/3, /*remote_pages=*/2);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 16).ok());
  const absl::Status full = Reserve(2, 4);
  ASSERT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->MakeRoom(full), full) << "both are being written";
  store_->StopWriter(1, 0);
  const absl::Status still_full = store_->MakeRoom(full);
  EXPECT_EQ(still_full, full) << "five pages have a place below, eight are missing";
  ExpectAllRows(1, 32);
  ExpectBalanced();
  disk_->SetReachable(false);
  EXPECT_EQ(store_->MakeRoom(full), full);
  const absl::Status other = absl::InvalidArgumentError("page");
  EXPECT_EQ(store_->MakeRoom(other), other);
}

TEST_F(MakeRoomTest, DamagedPagesBelowDoNotStandInTheWayOfOthers) {
  Make(20, /*disk_pages=*/14);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_EQ(Disk().pages, 12);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(disk_->Damage(Key(1, i % 2, i / 4, i / 2 % 2)));
  ASSERT_TRUE(Write(3, 16).ok());
  const absl::Status full = Reserve(3, 4);
  ASSERT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(store_->MakeRoom(full).ok());
  EXPECT_TRUE(Reserve(3, 4).ok());
  ExpectAllRows(2, 32);
  EXPECT_EQ(Remote().moved_in, 4);
}

TEST_F(MakeRoomTest, NothingMovesForWhatWouldNeverFit) {
  Make(20);
  WriteAndFinish(1, 32);
  ASSERT_TRUE(Write(2, 16).ok());
  const absl::Status full = Reserve(2, 30);
  ASSERT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->MakeRoom(full), full);
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
}

}  // namespace
}  // namespace heavywater
