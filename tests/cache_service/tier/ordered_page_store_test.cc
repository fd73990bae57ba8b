#include "cache_service/tier/ordered_page_store.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tests/cache_service/tier/lower_tier_conformance.h"
#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Fake, LowerTierConformance,
                         ::testing::Values(LowerTierFactory{
                             "Memory", [](int64_t total_bytes, std::string*) {
                               return std::make_unique<FakeTier>("disk", total_bytes);
                             }}));

// With no tier below, and with one that takes everything whenever there is no room.
INSTANTIATE_TEST_SUITE_P(Ordered, PageStoreConformance,
                         ::testing::Values(PageStoreFactory{
                             "HostAlone",
                             [](int64_t bytes) {
                               return std::make_unique<OrderedPageStore>(
                                   std::make_unique<HostPageStore>(*Slab::Create("", bytes)),
                                   std::vector<std::unique_ptr<LowerTier>>(), OrderedStoreOptions(),
                                   Clock::Real());
                             }}),
                         [](const auto& info) { return info.param.name; });

using OrderedPageStoreTest = OrderedStoreFixture;

int64_t Pages(const Residence& residence) {
  return std::accumulate(residence.pages.begin(), residence.pages.end(), int64_t{0});
}

TEST(ResidenceTest, ATimeCountsInTheClassThatItDoesNotExceed) {
  Residence residence;
  for (const uint32_t seconds : {0, 1, 2, 600, 601, 1'000'000}) residence.Add(seconds);
  EXPECT_THAT(residence.pages, ::testing::ElementsAre(2, 1, 0, 0, 1, 1, 0, 0, 0, 1));
  EXPECT_EQ(residence.seconds, 1'001'204);
}

TEST_F(OrderedPageStoreTest, NothingMovesBelowTheHighWatermark) {
  Make(20);
  WriteAndFinish(1, 32);
  EXPECT_FALSE(store_->Turn());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(Disk().pages, 0);
}

TEST_F(OrderedPageStoreTest, AboveItTheColdestGoDownUntilTheLowWatermark) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);  // 18 of 20 pages
  ASSERT_TRUE(ReadPage(1, 0).ok()) << "now 2 is the colder one";
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(2), 0);
  EXPECT_EQ(store_->HostBytes(1), 4 * kTestPageBytes) << "no more than to the low watermark";
  EXPECT_EQ(store_->SequenceBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(Disk().pages, 12);
  EXPECT_EQ(Disk().moved_in, 12);
  EXPECT_EQ(store_->Stats().moved_down, 12);
  EXPECT_EQ(Pages(store_->Stats().residence[kHostTier].down), 12);
  EXPECT_EQ(store_->Stats().pages, 4) << "of the slab";
  EXPECT_EQ(store_->Stats().used_bytes, 6 * kTestPageBytes);
}

TEST_F(OrderedPageStoreTest, WhatARankStillWritesStaysInTheSlab) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  EXPECT_FALSE(store_->Turn());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
}

TEST_F(OrderedPageStoreTest, EveryRowReadsBackFromWhateverTierItLiesIn) {
  Make(40, /*disk_pages=*/14);
  for (SequenceId sequence = 1; sequence <= 4; ++sequence) {
    WriteAndFinish(sequence, 40);  // 12 pages, the last one not full
    TurnUntilIdle();
  }
  EXPECT_GT(Remote().pages, 0);
  EXPECT_GT(Disk().pages, 0);
  for (SequenceId sequence = 1; sequence <= 4; ++sequence) ExpectAllRows(sequence, 40);
  EXPECT_GT(Disk().hits, 0);
  EXPECT_GT(Remote().hits, 0);
  EXPECT_EQ(store_->Stats().reads, 48) << "each once, wherever it came from";
  EXPECT_EQ(store_->Stats().bytes_read, 4 * 4 * 40 * 256);
  ExpectBalanced();
}

TEST_F(OrderedPageStoreTest, AReadBringsThePageUpWhenThereIsRoomAndOnlyThen) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  const int64_t used = store_->Stats().used_bytes;
  ASSERT_EQ(used, 6 * kTestPageBytes);
  ExpectAllRows(1, 32);
  EXPECT_EQ(store_->HostBytes(1), 3 * kTestPageBytes) << "to the low watermark";
  EXPECT_EQ(Disk().moved_up, 3);
  EXPECT_EQ(store_->Stats().moved_up, 3);
  EXPECT_EQ(Disk().pages, 9) << "what came up is not below any more";
  ExpectAllRows(1, 32);
  EXPECT_EQ(Disk().hits, 8 + 5);
  EXPECT_FALSE(store_->Turn()) << "what came up does not push anything down";
  ExpectBalanced();
}

TEST_F(OrderedPageStoreTest, AFullDiskTierPassesItsColdestOn) {
  Make(20, /*disk_pages=*/8);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  EXPECT_EQ(Remote().moved_in, Disk().moved_down);
  EXPECT_EQ(Pages(store_->Stats().residence[1].down), Disk().moved_down);
  EXPECT_LE(Disk().pages, 8);
  EXPECT_GE(Remote().pages, 4);
  EXPECT_TRUE(remote_->Holds(Key(1, 0)) || remote_->Holds(Key(1, 1))) << "the coldest";
  ExpectAllRows(1, 32);
  ExpectAllRows(2, 32);
}

TEST_F(OrderedPageStoreTest, ARefusedPageStaysWhereItWasAndIsCountedAndTriedAgain) {
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

TEST_F(OrderedPageStoreTest, WhatATierRefusesGoesToTheNextOne) {
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

TEST_F(OrderedPageStoreTest, ATierThatBeginsAndCeasesToRefuseIsToldOnce) {
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

TEST_F(OrderedPageStoreTest, ATierThatIsAwayHoldsNothingUpAndItsPagesAreUnavailable) {
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

TEST_F(OrderedPageStoreTest, ADamagedPageIsDataLossAndALostOneAMissForItselfOnly) {
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

TEST_F(OrderedPageStoreTest, ADamagedPageIsNotPassedOnAndDoesNotHoldOthersBack) {
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

TEST_F(OrderedPageStoreTest, AnEndedSequenceIsErasedInEveryTier) {
  Make(20, /*disk_pages=*/8);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_TRUE(store_->Release(1).ok());
  ASSERT_TRUE(store_->Release(2).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(ReadPage(1, 0).code(), absl::StatusCode::kNotFound);
  remote_->SetReachable(false);
  TurnUntilIdle();
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_GT(Remote().used_bytes, 0) << "counts as used until it is known to be erased";
  remote_->SetReachable(true);
  TurnUntilIdle();
  EXPECT_EQ(Remote().used_bytes, 0);
}

TEST_F(OrderedPageStoreTest, ASequenceThatEndsWhileItsPagesMoveLeavesNothingBehind) {
  Make(20);
  WriteAndFinish(1, 32);
  WriteAndFinish(2, 32);
  disk_->OnPut([this] { (void)store_->Release(1); });
  TurnUntilIdle();
  disk_->OnPut(nullptr);
  TurnUntilIdle();
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 9 * kTestPageBytes);
  ExpectAllRows(2, 32);
}

TEST_F(OrderedPageStoreTest, ASequenceThatIsToGoOnStaysInTheSlabUntilItsRanksHaveWrittenAgain) {
  Make(20);
  WriteAndFinish(1, 32);
  ASSERT_TRUE(store_->Extend(1, 2000).ok());
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes) << "the colder one, but it is awaited";
  EXPECT_LT(store_->HostBytes(2), 8 * kTestPageBytes);
  ASSERT_TRUE(
      store_->Reserve({.sequence = 1, .heads = {0, 2}, .num_pages = 2}, /*direct=*/false).ok());
  store_->StopWriter(1, 0);
  WriteAndFinish(3, 32);
  TurnUntilIdle();
  EXPECT_LT(store_->HostBytes(1), 8 * kTestPageBytes);
  ExpectAllRows(1, 32);
  ExpectAllRows(2, 32);
  ExpectBalanced();
}

TEST_F(OrderedPageStoreTest, ARankThatComesBackKeepsItsPagesInTheSlab) {
  Make(20);
  WriteAndFinish(1, 24);
  WriteAndFinish(2, 32);
  const RowRange more = {1, 0, 0, 24, 8};
  disk_->OnPut([&] {
    ASSERT_TRUE(
        store_->Reserve({.sequence = 1, .heads = {0, 2}, .num_pages = 2}, /*direct=*/false).ok());
    EXPECT_TRUE(store_->Write(0, more, TestRows(more)).ok());
    disk_->OnPut(nullptr);
  });
  (void)store_->Turn();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_FALSE(disk_->Holds(Key(1, 0)));
  EXPECT_FALSE(disk_->Holds(Key(1, 1)));
  ASSERT_TRUE(ReadPage(1, 1, 0, 0, 8).ok());
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      const RowRange rows = {1, layer, head, 24, 8};
      ASSERT_TRUE(store_->Write(0, rows, TestRows(rows)).ok());
    }
  }
  ASSERT_TRUE(store_->Commit(1, 0, 32).ok());
  ExpectAllRows(1, 32);
  store_->StopWriter(1, 0);
  TurnUntilIdle();
  ExpectAllRows(1, 32);
}

TEST_F(OrderedPageStoreTest, APageBelowTheSlabCannotBeWrittenBeforeItIsReservedAgain) {
  Make(20);
  WriteAndFinish(1, 24);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  const RowRange rows = {1, 0, 0, 24, 1};
  const absl::Status below = store_->Write(0, rows, TestRows(rows));
  EXPECT_EQ(below.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(below.message()), HasSubstr("has moved below host memory"));
  const auto again = store_->Reserve({.sequence = 1, .heads = {0, 2}, .num_pages = 2}, false);
  EXPECT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(store_->Write(0, rows, TestRows(rows)).ok());
  EXPECT_TRUE(
      store_->Reserve({.sequence = 1, .heads = {0, 2}, .first_page = 2, .num_pages = 1}, false)
          .ok())
      << "new pages go on";
}

TEST_F(OrderedPageStoreTest, PagesThatWereReservedAndNeverWrittenAreGivenBackFirst) {
  Make(24);
  WriteAndFinish(1, 8, /*reserved_pages=*/4);  // 16 pages, 12 of them empty
  ASSERT_TRUE(Write(2, 8).ok());
  TurnUntilIdle();
  EXPECT_EQ(store_->SequenceBytes(1), 4 * kTestPageBytes);
  ExpectAllRows(1, 8);
  ExpectAllRows(2, 8);
  EXPECT_EQ(ReadPage(1, 1).code(), absl::StatusCode::kNotFound);
}

TEST_F(OrderedPageStoreTest, AFinalPageThatIsNotFullEndsAtItsWatermarkBelowToo) {
  Make(20);
  WriteAndFinish(1, 24);
  WriteAndFinish(2, 32);
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  EXPECT_TRUE(ReadPage(1, 1, 0, 0, 8).ok());
  EXPECT_EQ(ReadPage(1, 1, 0, 0, 9).code(), absl::StatusCode::kOutOfRange);
}

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

TEST_F(OrderedPageStoreTest, ASequenceIsBroughtUpWholeForItsRanks) {
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

TEST_F(OrderedPageStoreTest, OthersMakeRoomForOneThatIsBroughtUp) {
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

TEST_F(OrderedPageStoreTest, OneThatFindsNoRoomOrNoTierIsNotLost) {
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

TEST_F(OrderedPageStoreTest, ATruncatedSequenceWhosePagesLieBelowIsWrittenAnewOnceItIsUp) {
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

// A rank that goes on after another text gives up what it has no room for.
TEST_F(OrderedPageStoreTest, APageThatIsGivenUpOnItsWayDownTakesNoOthersWithIt) {
  Make(40);
  WriteAndFinish(1, 16);
  EXPECT_GT(store_->FlushBatch(1), 0);
  ASSERT_EQ(Disk().pages, 4);
  ASSERT_TRUE(store_->Extend(1, 1000).ok());
  ASSERT_TRUE(
      store_->Reserve({.sequence = 1, .heads = {0, 2}, .first_page = 1, .num_pages = 1}, false)
          .ok());
  for (int of_page = 0; of_page < 4; ++of_page) {
    const RowRange rows = {1, of_page / 2, of_page % 2, 16, 16};
    ASSERT_TRUE(store_->Write(0, rows, TestRows(rows)).ok());
  }
  ASSERT_TRUE(store_->Commit(1, 0, 32).ok());
  store_->StopWriter(1, 0);
  int hooks = 0;
  disk_->OnPut([&] {
    if (hooks++ > 0) return;
    ASSERT_TRUE(store_->Extend(1, 1000).ok());
    ASSERT_TRUE(store_->Truncate(1, 16).ok());
    EXPECT_EQ(*store_->Skip(1, 0, /*first_page=*/1, /*num_pages=*/1), 4);
  });
  store_->FlushBatch(1);
  EXPECT_EQ(hooks, 1);
  TurnUntilIdle();
  EXPECT_EQ(Disk().pages, 4);
  ExpectAllRows(1, 16);
  EXPECT_EQ(ReadPage(1, 1).code(), absl::StatusCode::kNotFound);
}

TEST_F(OrderedPageStoreTest, APageBelowThatIsGivenUpFreesNothingOfTheSlab) {
  Make(40);
  WriteAndFinish(1, 32);
  while (store_->FlushBatch(1) > 0) {
  }
  ASSERT_EQ(Disk().pages, 8);
  ASSERT_TRUE(store_->Extend(1, 1000).ok());
  ASSERT_TRUE(store_->Truncate(1, 16).ok());
  const int64_t used = store_->Stats().used_bytes;
  EXPECT_EQ(*store_->Skip(1, 0, /*first_page=*/1, /*num_pages=*/1), 0);
  EXPECT_EQ(store_->Stats().used_bytes, used);
  ExpectBalanced();
  ExpectAllRows(1, 16);
  ASSERT_TRUE(store_->Release(1).ok());
  TurnUntilIdle();
  EXPECT_EQ(Disk().pages, 0);
}

}  // namespace
}  // namespace heavywater
