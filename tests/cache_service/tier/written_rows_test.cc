// Pages whose rows come through Write(). One that comes whole is summed while it is copied: what
// becomes of it before it is sealed must show.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/slab_view.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// One head, two pages of 16 rows, reserved by a rank that streams.
class WholePageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(store_.Open({.sequence = 1, .geometry = kGeometry, .max_tokens = 64}).ok());
    const auto reserved = store_.Reserve({.sequence = 1, .heads = {0, 1}, .num_pages = 2}, false);
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    first_page_ = store_.slab().At(reserved->offsets.at(0));
    watermark_ = reserved->watermark_offset;
  }

  static constexpr PageGeometry kGeometry = {
      .num_layers = 1, .num_kv_heads = 1, .page_tokens = 16, .row_bytes = 256};
  static constexpr RowRange kFirst = {.sequence = 1, .num_positions = 16};
  static constexpr RowRange kSecond = {.sequence = 1, .first_position = 16, .num_positions = 16};
  HostPageStore store_{*Slab::Create("", 1 << 20)};
  std::byte* first_page_ = nullptr;
  int64_t watermark_ = 0;  // its offset
};

TEST_F(WholePageTest, WhatIsWrittenAnewInPartBeforeItIsCommittedIsRead) {
  std::vector<std::byte> rows = TestRows(kFirst);
  ASSERT_TRUE(store_.Write(0, kFirst, rows).ok());
  ASSERT_TRUE(store_.Write(0, kSecond, rows).ok());
  const RowRange part = {.sequence = 1, .first_position = 5, .num_positions = 3};
  const std::vector<std::byte> other(3 * 256, std::byte{7});
  ASSERT_TRUE(store_.Write(0, part, other).ok());
  ASSERT_TRUE(store_.Commit(1, 0, 32).ok());
  std::vector<std::byte> got(rows.size());
  EXPECT_TRUE(store_.Read(kSecond, got).ok());
  EXPECT_EQ(got, rows);
  std::copy(other.begin(), other.end(), rows.begin() + 5 * 256);
  EXPECT_TRUE(store_.Read(kFirst, got).ok());
  EXPECT_EQ(got, rows);
  got.resize(other.size());
  EXPECT_TRUE(store_.Read(part, got).ok());
  EXPECT_EQ(got, other);
}

TEST_F(WholePageTest, OneThatIsDamagedBeforeItIsCommittedIsDataLoss) {
  ASSERT_TRUE(store_.Write(0, kFirst, TestRows(kFirst)).ok());
  first_page_[100] ^= std::byte{1};
  ASSERT_TRUE(store_.Commit(1, 0, 16).ok());
  std::vector<std::byte> got(16 * 256);
  EXPECT_EQ(store_.Read(kFirst, got).code(), absl::StatusCode::kDataLoss);
}

TEST_F(WholePageTest, OneThatItsRankMayChangeInTheSlabIsSummedAsItLiesThere) {
  std::vector<std::byte> rows = TestRows(kFirst);
  ASSERT_TRUE(store_.Write(0, kFirst, rows).ok());
  ASSERT_TRUE(store_.Reserve({.sequence = 1, .heads = {0, 1}, .num_pages = 1}, true).ok());
  first_page_[100] ^= std::byte{1};
  rows[100] ^= std::byte{1};
  ASSERT_TRUE(store_.Commit(1, 0, 16).ok());
  std::vector<std::byte> got(rows.size());
  EXPECT_TRUE(store_.Read(kFirst, got).ok());
  EXPECT_EQ(got, rows);
}

// Three tokens of another sequence, of a page that its own rank has not filled.
TEST_F(WholePageTest, AForksRankThatStreamsCommitsNoRowsThatItHasNotWritten) {
  const RowRange three = {.sequence = 1, .num_positions = 3};
  ASSERT_TRUE(store_.Write(0, three, TestRows(three)).ok());
  ASSERT_TRUE(store_.Commit(1, 0, 3).ok());
  store_.StopWriter(1, 0);
  ASSERT_EQ(*store_.OpenFrom({.sequence = 2, .geometry = kGeometry, .max_tokens = 64},
                             {.sequence = 1, .tokens = 3, .fork = true, .min_tokens = 3}),
            3);
  ASSERT_TRUE(store_.Reserve({.sequence = 2, .heads = {0, 1}, .num_pages = 1}, false).ok());
  const absl::Status refused = store_.Commit(2, 0, 16);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has 3 rows written, want 16"));
  const RowRange more = {.sequence = 2, .first_position = 3, .num_positions = 13};
  ASSERT_TRUE(store_.Write(0, more, TestRows(more)).ok());
  ASSERT_TRUE(store_.Commit(2, 0, 16).ok());
  std::vector<std::byte> got(13 * 256);
  ASSERT_TRUE(store_.Read(more, got).ok());
  EXPECT_EQ(got, TestRows(more));
}

// A process that maps the slab, and one after it that does not.
TEST_F(WholePageTest, ARankGoesOnStreamingBehindWhatWasWrittenInPlace) {
  ASSERT_TRUE(store_.Reserve({.sequence = 1, .heads = {0, 1}, .num_pages = 1}, true).ok());
  std::fill_n(first_page_, 9 * 256, std::byte{7});
  PublishWatermark(store_.slab().Watermark(watermark_), 5);
  store_.StopWriter(1, 0);
  ASSERT_TRUE(store_.Reserve({.sequence = 1, .heads = {0, 1}, .num_pages = 1}, false).ok());
  EXPECT_THAT(std::string(store_.Commit(1, 0, 9).message()),
              HasSubstr("has 5 rows written, want 9"));
  const RowRange one = {.sequence = 1, .first_position = 5, .num_positions = 1};
  ASSERT_TRUE(store_.Write(0, one, TestRows(one)).ok());
  ASSERT_TRUE(store_.Commit(1, 0, 6).ok());
}

// One head of a sequence beside what its rows must be: written in any parts, anew before they are
// committed, and after the sequence has gone back.
class WrittenRows {
 public:
  WrittenRows(uint32_t seed, const PageGeometry& geometry)
      : random_(seed), geometry_(geometry), store_(*Slab::Create("", 1 << 22)) {}

  void Run() {
    ASSERT_TRUE(
        store_.Open({.sequence = 1, .geometry = geometry_, .max_tokens = kPages * tokens()}).ok());
    Reserve();
    rows_.resize(kPages * tokens() * geometry_.row_bytes);
    for (int step = 0; step < 400; ++step) {
      const int64_t what = Below(20);
      if (what < 12) Write();
      if (what >= 12 && what < 15) Commit();
      if (what >= 15 && what < 19) Read();
      if (what == 19) GoBack();
      if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_GT(committed_reads_, 0);
  }

 private:
  static constexpr int64_t kPages = 4;
  int64_t tokens() const { return geometry_.page_tokens; }
  int64_t Below(int64_t end) { return static_cast<int64_t>(random_() % end); }
  void Reserve() {
    ASSERT_TRUE(store_.Reserve({.sequence = 1, .heads = {0, 1}, .num_pages = kPages}, false).ok());
  }
  std::span<std::byte> Rows(int64_t first, int64_t count) {
    return std::span(rows_).subspan(first * geometry_.row_bytes, count * geometry_.row_bytes);
  }
  // Whole pages as often as parts; some rows that are there already, but none that are committed.
  void Write() {
    const int64_t page_begin = written_ / tokens() * tokens();
    int64_t first = std::max(committed_, page_begin + Below(written_ - page_begin + 1));
    if (Below(2) == 0) first = std::max(committed_, page_begin);
    const int64_t left = (first / tokens() + 1) * tokens() - first;
    if (first >= kPages * tokens()) return;
    const int64_t count = Below(2) == 0 ? left : 1 + Below(left);
    for (std::byte& byte : Rows(first, count)) byte = static_cast<std::byte>(random_());
    ASSERT_TRUE(store_
                    .Write(0, {.sequence = 1, .first_position = first, .num_positions = count},
                           Rows(first, count))
                    .ok());
    written_ = std::max(written_, first + count);
  }
  void Commit() {
    committed_ += Below(written_ - committed_ + 1);
    ASSERT_TRUE(store_.Commit(1, 0, committed_).ok());
  }
  void Read() {
    if (committed_ == 0) return;
    const int64_t first = Below(committed_);
    const int64_t end = std::min(committed_, (first / tokens() + 1) * tokens());
    const int64_t count = 1 + Below(end - first);
    std::vector<std::byte> got(count * geometry_.row_bytes);
    const absl::Status read =
        store_.Read({.sequence = 1, .first_position = first, .num_positions = count}, got);
    ASSERT_TRUE(read.ok()) << read;
    ASSERT_TRUE(std::ranges::equal(got, Rows(first, count))) << first << " " << count;
    ++committed_reads_;
  }
  void GoBack() {
    committed_ = Below(committed_ + 1);
    written_ = committed_;
    ASSERT_TRUE(store_.Truncate(1, committed_).ok());
    Reserve();
  }

  std::mt19937 random_;
  const PageGeometry geometry_;
  HostPageStore store_;
  std::vector<std::byte> rows_;
  int64_t written_ = 0;
  int64_t committed_ = 0;
  int committed_reads_ = 0;
};

TEST(WrittenRowsTest, InAnyPartsTheyReadBackAsTheyWereWrittenLast) {
  for (const int page_tokens : {1, 3, 16}) {
    for (const int row_bytes : {1, 8, 250, 512}) {
      for (uint32_t seed = 0; seed < 10; ++seed) {
        SCOPED_TRACE(absl::StrCat(page_tokens, " rows of ", row_bytes, ", seed ", seed));
        WrittenRows(seed, {.num_layers = 1,
                           .num_kv_heads = 1,
                           .page_tokens = page_tokens,
                           .row_bytes = row_bytes})
            .Run();
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace heavywater
