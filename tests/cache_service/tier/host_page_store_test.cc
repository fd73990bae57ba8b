#include "cache_service/tier/host_page_store.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/slab_view.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {
namespace {

std::unique_ptr<HostPageStore> MakeStore(bool shared, int64_t bytes) {
  static int count = 0;
  const std::string name =
      shared ? absl::StrCat("heavywater-store-test-", getpid(), "-", ++count) : "";
  auto slab = Slab::Create(name, bytes);
  EXPECT_TRUE(slab.ok()) << slab.status();
  return std::make_unique<HostPageStore>(*std::move(slab));
}

INSTANTIATE_TEST_SUITE_P(
    Host, PageStoreConformance,
    ::testing::Values(
        PageStoreFactory{"Slab", [](int64_t bytes) { return MakeStore(true, bytes); }},
        PageStoreFactory{"Memory", [](int64_t bytes) { return MakeStore(false, bytes); }}),
    [](const auto& info) { return info.param.name; });

// A rank that has mapped the slab, as in another process.
class DirectRankTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = MakeStore(true, 1 << 20);
    const Slab& slab = store_->slab();
    auto view = SlabView::Map(slab.name(), slab.object_bytes(), slab.nonce(), kSlabFormatVersion);
    ASSERT_TRUE(view.ok()) << view.status();
    view_ = *std::move(view);
    ASSERT_TRUE(store_->Open({.sequence = 1, .geometry = kTestGeometry, .max_tokens = 1000}).ok());
    auto reservation = store_->Reserve(kRange, /*direct=*/true);
    ASSERT_TRUE(reservation.ok());
    reservation_ = *std::move(reservation);
  }

  // [layer][head][page] of kRange.
  std::byte* Page(int layer, int head, int page) {
    return view_->At(reservation_.offsets.at((layer * 2 + head) * 2 + page), kTestPageBytes);
  }
  void Fill(int layer, int head, int64_t tokens) {
    for (int64_t position = 0; position < tokens; ++position) {
      const auto row = TestRows({1, layer, head, position, 1});
      std::memcpy(Page(layer, head, position / 16) + position % 16 * 256, row.data(), 256);
    }
  }
  void Publish(int64_t tokens) {
    PublishWatermark(*view_->Watermark(reservation_.watermark_offset), tokens);
  }
  absl::Status Read(const RowRange& rows, std::vector<std::byte>* bytes) {
    bytes->resize(rows.num_positions * 256);
    return store_->Read(rows, *bytes);
  }

  static constexpr PageRange kRange = {
      .sequence = 1, .rank = 0, .heads = {0, 2}, .first_page = 0, .num_pages = 2};
  std::unique_ptr<HostPageStore> store_;
  std::unique_ptr<SlabView> view_;
  Reservation reservation_;
};

TEST_F(DirectRankTest, WhatARankPublishesInTheSlabIsReadableUpToItsWatermark) {
  std::vector<std::byte> bytes;
  Fill(1, 1, 20);
  EXPECT_EQ(Read({1, 1, 1, 0, 1}, &bytes).code(), absl::StatusCode::kOutOfRange);
  Publish(20);
  ASSERT_TRUE(Read({1, 1, 1, 16, 4}, &bytes).ok());
  EXPECT_EQ(bytes, TestRows({1, 1, 1, 16, 4}));
  EXPECT_EQ(Read({1, 1, 1, 16, 5}, &bytes).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(store_->Commit(1, 0, 20).ok()) << "harmless for a rank with the slab";
}

TEST_F(DirectRankTest, ASealedPageWhoseBytesChangeIsDataLossAndCounted) {
  std::vector<std::byte> bytes;
  Fill(0, 0, 32);
  Publish(32);
  ASSERT_TRUE(Read({1, 0, 0, 0, 1}, &bytes).ok());
  Page(0, 0, 0)[4095] ^= std::byte{1};
  EXPECT_EQ(Read({1, 0, 0, 0, 1}, &bytes).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Read({1, 0, 0, 15, 1}, &bytes).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(store_->Stats().checksum_failures, 2);
  EXPECT_TRUE(Read({1, 0, 0, 16, 16}, &bytes).ok()) << "other pages go on";
}

TEST_F(DirectRankTest, AnOpenPageGrowsBetweenReads) {
  std::vector<std::byte> bytes;
  Fill(0, 0, 15);
  Publish(15);
  ASSERT_TRUE(Read({1, 0, 0, 0, 15}, &bytes).ok());
  Fill(0, 0, 16);
  Publish(16);
  ASSERT_TRUE(Read({1, 0, 0, 15, 1}, &bytes).ok());
  EXPECT_EQ(bytes, TestRows({1, 0, 0, 15, 1}));
}

TEST_F(DirectRankTest, PagesAreNotReusedWhileTheRankMayStillWrite) {
  const int64_t used = store_->Stats().used_bytes;
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, used);
  EXPECT_EQ(store_->Stats().retiring_bytes, used);
  EXPECT_EQ(store_->Stats().sequences, 0);
  std::vector<std::byte> bytes;
  EXPECT_EQ(Read({1, 0, 0, 0, 1}, &bytes).code(), absl::StatusCode::kNotFound);
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(store_->Stats().retiring_bytes, 0);
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().free_bytes, store_->Stats().total_bytes);
}

TEST_F(DirectRankTest, ARankThatHasStoppedLeavesNothingToWaitFor) {
  store_->StopWriter(1, 0);
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

TEST_F(DirectRankTest, ARankThatCouldNotMapTheSlabIsHeldToWhatItStreamed) {
  const RowRange rows = {1, 0, 0, 0, 4};
  ASSERT_TRUE(store_->Write(0, rows, TestRows(rows)).ok());
  EXPECT_EQ(store_->Commit(1, 0, 4).code(), absl::StatusCode::kFailedPrecondition)
      << "three pages of the four lack their rows";
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0) << "nobody writes in the slab";
}

// One that came from another cache service, say.
TEST(StreamedSequenceTest, WhoeverGoesOnInTheSlabWithAStreamedSequenceIsWaitedFor) {
  const auto store = MakeStore(true, 1 << 20);
  ASSERT_TRUE(store->Open({.sequence = 1, .geometry = kTestGeometry, .max_tokens = 1000}).ok());
  const PageRange range = {
      .sequence = 1, .rank = 0, .heads = {0, 2}, .first_page = 0, .num_pages = 1};
  ASSERT_TRUE(store->Reserve(range, /*direct=*/false).ok());
  for (const int layer : {0, 1}) {
    for (const int head : {0, 1}) {
      const RowRange rows = {1, layer, head, 0, 10};
      ASSERT_TRUE(store->Write(0, rows, TestRows(rows)).ok());
    }
  }
  ASSERT_TRUE(store->Commit(1, 0, 10).ok());
  const auto written = store->Written(1);
  ASSERT_TRUE(written.ok());
  ASSERT_EQ(written->size(), 1u);
  EXPECT_EQ(written->front().heads.count, 2);
  EXPECT_EQ(written->front().num_positions, 10);
  store->StopWriter(1, 0);
  ASSERT_TRUE(store->Reserve(range, /*direct=*/true).ok());
  ASSERT_TRUE(store->Release(1).ok());
  EXPECT_GT(store->Stats().retiring_bytes, 0);
  store->StopWriter(1, 0);
  EXPECT_EQ(store->Stats().used_bytes, 0);
  EXPECT_EQ(store->Written(1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DirectRankTest, AfterTruncateASealedPageIsWrittenAnewByWhoeverReservesItAgain) {
  std::vector<std::byte> bytes;
  Fill(0, 0, 32);
  Publish(32);
  ASSERT_TRUE(Read({1, 0, 0, 0, 32 - 16}, &bytes).ok());
  ASSERT_TRUE(Read({1, 0, 0, 16, 16}, &bytes).ok());
  store_->StopWriter(1, 0);
  const int64_t used = store_->Stats().used_bytes;
  ASSERT_TRUE(store_->Truncate(1, 10).ok());
  EXPECT_EQ(store_->Watermark(1, 0), 10);
  EXPECT_EQ(store_->Stats().used_bytes, used - 4 * kTestPageBytes) << "the second page of each";
  EXPECT_TRUE(Read({1, 0, 0, 0, 10}, &bytes).ok());
  EXPECT_EQ(Read({1, 0, 0, 0, 11}, &bytes).code(), absl::StatusCode::kOutOfRange);
  auto reservation = store_->Reserve(kRange, /*direct=*/true);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  reservation_ = *std::move(reservation);
  std::memset(Page(0, 0, 0) + 10 * 256, 7, 6 * 256);
  Publish(16);
  ASSERT_TRUE(Read({1, 0, 0, 15, 1}, &bytes).ok());
  EXPECT_EQ(bytes, std::vector<std::byte>(256, std::byte{7}));
  ASSERT_TRUE(Read({1, 0, 0, 0, 10}, &bytes).ok());
  EXPECT_EQ(bytes, TestRows({1, 0, 0, 0, 10}));
}

TEST_F(DirectRankTest, TruncateLeavesThePagesOfARankThatMayStillWrite) {
  Fill(0, 0, 32);
  Publish(32);
  const int64_t used = store_->Stats().used_bytes;
  ASSERT_TRUE(store_->Truncate(1, 10).ok());
  EXPECT_EQ(store_->Stats().used_bytes, used);
  EXPECT_EQ(store_->Watermark(1, 0), 10);
  ASSERT_TRUE(store_->Truncate(1, 20).ok());
  EXPECT_EQ(store_->Watermark(1, 0), 10) << "it does not grow by that";
  EXPECT_EQ(store_->Truncate(9, 1).code(), absl::StatusCode::kNotFound);
}

TEST_F(DirectRankTest, AnExtendedSequenceHasRoomForMore) {
  const PageRange beyond = {.sequence = 1, .heads = {0, 1}, .first_page = 63, .num_pages = 2};
  EXPECT_FALSE(store_->Reserve(beyond, true).ok()) << "1000 tokens are 63 pages";
  ASSERT_TRUE(store_->Extend(1, 1040).ok());
  EXPECT_TRUE(store_->Reserve(beyond, true).ok());
  ASSERT_TRUE(store_->Extend(1, 10).ok());
  EXPECT_TRUE(store_->Reserve(beyond, true).ok()) << "it never has fewer";
  EXPECT_EQ(store_->Extend(9, 10).code(), absl::StatusCode::kNotFound);
}

TEST_F(DirectRankTest, NonsenseInAWatermarkOpensNothingBeyondTheSequence) {
  view_->Watermark(reservation_.watermark_offset)->store(int64_t{1} << 60);
  EXPECT_EQ(store_->Watermark(1, 0), 1000);
  view_->Watermark(reservation_.watermark_offset)->store(-5);
  EXPECT_EQ(store_->Watermark(1, 0), 0);
}

TEST(PageEntryTest, BookkeepingOfAPageIsUnder100Bytes) {
  // Key, entry, control byte, at the table's lowest load of 7/16.
  EXPECT_LT((sizeof(uint64_t) + sizeof(PageEntry) + 1) * 16 / 7, 100u);
}

}  // namespace
}  // namespace heavywater
