#include "worker/server/remote_sequence.h"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/slab.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

// 2 layers, heads 1 and 2 of 4, pages of 4 rows of 16 bytes.
constexpr PageGeometry kGeometry{
    .num_layers = 2, .num_kv_heads = 4, .page_tokens = 4, .row_bytes = 16};
constexpr HeadRange kHeads{.first = 1, .count = 2};

class RemoteSequenceTest : public ::testing::Test {
 protected:
  RemoteSequenceTest() {
    const std::string name = "heavywater-test-" + std::to_string(getpid());
    slab_ = *Slab::Create(name, 1 << 20);
    view_ =
        *SlabView::Map(slab_->name(), slab_->object_bytes(), slab_->nonce(), kSlabFormatVersion);
    watermark_ = *slab_->Allocate(kWatermarkCellBytes);
  }

  // What the service would answer.
  std::vector<int64_t> Offsets(int64_t num_pages) {
    std::vector<int64_t> offsets;
    for (int64_t i = 0; i < 2 * 2 * num_pages; ++i) {
      offsets.push_back(*slab_->Allocate(kGeometry.page_bytes()));
    }
    return offsets;
  }

  std::unique_ptr<Slab> slab_;
  std::shared_ptr<SlabView> view_;
  int64_t watermark_ = 0;
};

void FillRow(RemoteSequence& sequence, int64_t position, int value) {
  for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
    for (int head = kHeads.first; head < kHeads.first + kHeads.count; ++head) {
      std::byte* page = sequence.Page(layer, head, kGeometry.PageOf(position));
      ASSERT_NE(page, nullptr);
      std::memset(page + kGeometry.RowOf(position) * kGeometry.row_bytes, value + layer * 16 + head,
                  static_cast<size_t>(kGeometry.row_bytes));
    }
  }
}

TEST_F(RemoteSequenceTest, WritesIntoTheSlabAndPublishesThere) {
  RemoteSequence sequence(1, kGeometry, kHeads, view_);
  const std::vector<int64_t> offsets = Offsets(2);
  ASSERT_TRUE(sequence.AddGrant({0, 2}, offsets, watermark_).ok());
  EXPECT_EQ(sequence.num_pages(), 2);
  FillRow(sequence, 5, 100);
  // [layer 1][head 2][page 1] is the last offset.
  EXPECT_EQ(slab_->At(offsets.back())[16], std::byte{100 + 16 + 2});
  sequence.Publish(6);
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 6);
  EXPECT_EQ(sequence.committed(), 6);
  EXPECT_EQ(sequence.Page(0, 0, 0), nullptr);  // another rank's head
  EXPECT_EQ(sequence.Page(0, 1, 2), nullptr);
}

TEST_F(RemoteSequenceTest, LocalPagesReachTheSlabBeforeTheWatermarkPassesThem) {
  RemoteSequence sequence(1, kGeometry, kHeads, view_);
  ASSERT_TRUE(sequence.AddGrant({0, 1}, Offsets(1), watermark_).ok());
  ASSERT_TRUE(sequence.AddLocalPages(3).ok());
  for (int position = 0; position < 10; ++position) FillRow(sequence, position, position);
  sequence.Publish(10);
  // Nothing moves it before the rows have been handed over.
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 0);
  EXPECT_EQ(sequence.CommitEnd(), 4);
  const std::vector<int64_t> offsets = Offsets(2);
  EXPECT_EQ(sequence.NextGrant(3).first, 1);
  EXPECT_EQ(sequence.NextGrant(3).count, 2);
  ASSERT_TRUE(sequence.AddGrant({1, 2}, offsets, watermark_).ok());
  EXPECT_EQ(sequence.CommitEnd(), 10);
  sequence.RowsToMove(0, 10).CopyToSlab();
  sequence.Committed(10);
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 10);
  // Position 9, row 1 of page 2, layer 1, head 2.
  EXPECT_EQ(slab_->At(offsets.back())[16], std::byte{9 + 16 + 2});
}

TEST_F(RemoteSequenceTest, StreamedRowsAreCutAtPages) {
  RemoteSequence sequence(1, kGeometry, kHeads, nullptr);
  ASSERT_TRUE(sequence.AddGrant({0, 3}, {}, 0).ok());
  for (int position = 0; position < 9; ++position) FillRow(sequence, position, position);
  sequence.Publish(9);
  const LocalRows local = sequence.RowsToMove(2, 9);
  ASSERT_EQ(local.rows.size(), 3u * 4);
  EXPECT_EQ(local.rows[0].first_position, 2);
  EXPECT_EQ(local.rows[0].rows.size(), 2u * 16);
  const PageRows& last = local.rows.back();
  EXPECT_EQ(last.first_position, 8);
  EXPECT_EQ(last.layer, 1);
  EXPECT_EQ(last.kv_head, 2);
  EXPECT_EQ(last.rows[0], std::byte{8 + 16 + 2});
}

TEST_F(RemoteSequenceTest, TheWatermarkPassesASkippedPageOnceTheServiceKnows) {
  RemoteSequence sequence(1, kGeometry, kHeads, view_);
  ASSERT_TRUE(sequence.AddGrant({0, 1}, Offsets(1), watermark_).ok());
  sequence.SkipPages(1, 2);
  EXPECT_EQ(sequence.Page(0, 1, 1), nullptr);
  EXPECT_EQ(sequence.ungranted_bytes(), 0);
  sequence.Publish(7);
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 4) << "readers would take it for written";
  const auto skipped = sequence.NextGrant(4);
  EXPECT_TRUE(skipped.skipped);
  EXPECT_EQ(skipped.first, 1);
  EXPECT_EQ(skipped.count, 1);
  sequence.AddSkip(skipped);
  const auto next = sequence.NextGrant(4);
  EXPECT_FALSE(next.skipped);
  EXPECT_EQ(next.first, 2);
  EXPECT_EQ(next.count, 2);
  ASSERT_TRUE(sequence.AddGrant(next, Offsets(2), watermark_).ok());
  EXPECT_NE(sequence.Page(0, 1, 2), nullptr);
  EXPECT_EQ(sequence.reserved_bytes(), 3 * sequence.page_row_bytes());
  sequence.Publish(11);
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 11);
}

TEST_F(RemoteSequenceTest, AGrantThatWasOnItsWayDoesNotBringASkippedPageBack) {
  for (const bool stream : {false, true}) {
    RemoteSequence sequence(1, kGeometry, kHeads, stream ? nullptr : view_);
    const auto offsets = [&](int64_t pages) {
      return stream ? std::vector<int64_t>() : Offsets(pages);
    };
    ASSERT_TRUE(sequence.AddGrant({0, 1}, offsets(1), watermark_).ok());
    const auto asked = sequence.NextGrant(4);
    EXPECT_EQ(asked.count, 3);
    sequence.SkipPages(1, 2);
    ASSERT_TRUE(sequence.AddGrant(asked, offsets(3), watermark_).ok());
    EXPECT_EQ(sequence.Page(0, 1, 1), nullptr);
    EXPECT_NE(sequence.Page(0, 1, 3), nullptr);
    auto next = sequence.NextGrant(4);
    EXPECT_TRUE(next.skipped) << "the service has a place for it and must take it back";
    EXPECT_EQ(next.first, 1);
    EXPECT_EQ(next.count, 1);
    sequence.AddSkip(next);
    next = sequence.NextGrant(4);
    EXPECT_EQ(next.first, 2);
    EXPECT_EQ(next.count, 2);
    ASSERT_TRUE(sequence.AddGrant(next, offsets(2), watermark_).ok());
    EXPECT_EQ(sequence.NextGrant(4).count, 0);
    EXPECT_EQ(sequence.reserved_bytes(), 3 * sequence.page_row_bytes());
    sequence.Publish(9);
    EXPECT_EQ(sequence.CommitEnd(), 9);
  }
}

TEST_F(RemoteSequenceTest, APageThatHasComeMeanwhileIsGivenBackWhenItIsSkipped) {
  RemoteSequence sequence(1, kGeometry, kHeads, view_);
  ASSERT_TRUE(sequence.AddGrant({0, 3}, Offsets(3), watermark_).ok());
  const auto asked = sequence.NextGrant(4);
  sequence.Publish(4);
  sequence.SkipPages(1, 2);
  EXPECT_EQ(sequence.Page(0, 1, 1), nullptr);
  ASSERT_TRUE(sequence.AddGrant(asked, Offsets(1), watermark_).ok());
  const auto next = sequence.NextGrant(4);
  EXPECT_TRUE(next.skipped);
  EXPECT_EQ(next.first, 1);
  sequence.Publish(8);
  EXPECT_EQ(slab_->Watermark(watermark_).load(), 4);
  sequence.AddSkip(next);
  EXPECT_EQ(sequence.CommitEnd(), 8);
}

TEST_F(RemoteSequenceTest, OffsetsOutsideTheSlabAreRefused) {
  RemoteSequence sequence(1, kGeometry, kHeads, view_);
  std::vector<int64_t> offsets = Offsets(1);
  EXPECT_EQ(sequence.AddGrant({0, 1}, {offsets.data(), 3}, watermark_).code(),
            absl::StatusCode::kDataLoss);
  offsets[2] = int64_t{1} << 40;
  EXPECT_EQ(sequence.AddGrant({0, 1}, offsets, watermark_).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(sequence.AddGrant({0, 1}, Offsets(1), 7).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(sequence.num_pages(), 0);
}

}  // namespace
}  // namespace heavywater
