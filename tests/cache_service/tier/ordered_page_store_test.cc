#include "cache_service/tier/ordered_page_store.h"

#include <gmock/gmock.h>

#include <numeric>

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

// A rank that goes on after another text gives up what it has no room for.
TEST_F(OrderedPageStoreTest, APageThatIsGivenUpOnItsWayDownTakesNoOthersWithIt) {
  Make(40);
  WriteAndFinish(1, 16);
  EXPECT_GT(store_->FlushBatch(1), 0);
  ASSERT_EQ(Disk().pages, 4);
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
