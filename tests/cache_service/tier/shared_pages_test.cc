// Pages that several sequences hold: each counts once, nobody changes another's bytes, and the
// last one to let go frees them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/slab_view.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/tier/memory_state.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kPages = 60;
constexpr int64_t kRow = 4;      // pages of all layers and heads
constexpr int64_t kTokens = 40;  // two whole pages and a half

class SharedPagesTest : public ::testing::Test {
 protected:
  SharedPagesTest() {
    static int count = 0;
    name_ = absl::StrCat("heavywater-shared-test-", getpid(), "-", ++count);
    auto slab = Slab::Create(name_, kPages * kTestPageBytes);
    EXPECT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    nonce_ = (*slab)->nonce();
    object_bytes_ = (*slab)->object_bytes();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
  }
  ~SharedPagesTest() override {
    store_.reset();
    RemoveStaleSlab(name_);
  }
  void Restart() {
    store_.reset();
    auto slab = Slab::Adopt(name_, object_bytes_, nonce_);
    ASSERT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    const auto restored = store_->Restore();
    ASSERT_TRUE(restored.ok()) << restored.status();
  }
  static SequenceSpec Spec(SequenceId id, int num_ranks = 1) {
    return {.sequence = id,
            .fingerprint = 7,
            .geometry = kTestGeometry,
            .num_ranks = num_ranks,
            .max_tokens = 1000};
  }
  // As a rank that maps the slab would fill it.
  void Fill(SequenceId id, int64_t first, int64_t tokens, uint8_t value, int rank = 0) {
    const int64_t pages = (tokens + 15) / 16;
    const auto reserved =
        store_->Reserve({.sequence = id, .rank = rank, .heads = {0, 2}, .num_pages = pages}, true);
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    for (int64_t row = 0; row < kRow; ++row) {
      for (int64_t token = first; token < tokens; ++token) {
        std::byte* const page =
            store_->slab().At(reserved->offsets[static_cast<size_t>(row * pages + token / 16)]);
        std::memset(page + token % 16 * 256, value, 256);
      }
    }
    PublishWatermark(store_->slab().Watermark(reserved->watermark_offset), tokens);
  }
  void MakeSource(SequenceId id = 1) {
    ASSERT_TRUE(store_->Open(Spec(id)).ok());
    Fill(id, 0, kTokens, 11);
    store_->StopWriter(id, 0);
    EXPECT_EQ(*store_->PrepareShare(id, kTokens, true), 32);
  }
  // Of one position, in a layer and head.
  int ValueAt(SequenceId id, int64_t position) {
    std::vector<std::byte> row(256);
    const absl::Status read = store_->Read({id, 1, 1, position, 1}, row);
    return read.ok() ? static_cast<int>(row[0]) : -static_cast<int>(read.code());
  }
  int64_t UsedPages() {
    const PageStoreStats stats = store_->Stats();
    EXPECT_EQ(stats.used_bytes + stats.free_bytes, stats.total_bytes);
    // Watermarks take a unit of the size of a page.
    EXPECT_EQ(stats.used_bytes / kTestPageBytes, stats.pages + stats.sequences);
    return stats.pages;
  }

  std::string name_;
  uint64_t nonce_ = 0;
  int64_t object_bytes_ = 0;
  MemoryState state_;
  std::unique_ptr<HostPageStore> store_;
};

TEST_F(SharedPagesTest, APrefixTakesWholePagesAndEachCountsOnce) {
  MakeSource();
  EXPECT_EQ(UsedPages(), 3 * kRow);
  EXPECT_EQ(*store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = kTokens}), 32);
  EXPECT_EQ(UsedPages(), 3 * kRow);
  EXPECT_EQ(store_->Stats().shared_pages, 2 * kRow);
  EXPECT_EQ(store_->Watermark(2, 0), 32);
  EXPECT_EQ(ValueAt(2, 31), 11);
  EXPECT_EQ(ValueAt(2, 32), -static_cast<int>(absl::StatusCode::kNotFound));
  // Its rank goes on behind them.
  Fill(2, 32, 50, 22);
  EXPECT_EQ(UsedPages(), 5 * kRow);
  EXPECT_EQ(ValueAt(2, 31), 11);
  EXPECT_EQ(ValueAt(2, 49), 22);
  EXPECT_EQ(ValueAt(1, 39), 11);
}

TEST_F(SharedPagesTest, TheLastToLetGoFreesThem) {
  MakeSource();
  for (const SequenceId id : {2, 3}) {
    EXPECT_EQ(*store_->OpenFrom(Spec(id), {.sequence = 1, .tokens = 32}), 32);
  }
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(UsedPages(), 2 * kRow);
  EXPECT_EQ(ValueAt(2, 5), 11);
  ASSERT_TRUE(store_->Release(3).ok());
  EXPECT_EQ(UsedPages(), 2 * kRow);
  EXPECT_EQ(store_->Stats().shared_pages, 0) << "one holder is left";
  // And others can take them from who holds them now.
  EXPECT_EQ(*store_->OpenFrom(Spec(4), {.sequence = 2, .tokens = 20}), 16);
  ASSERT_TRUE(store_->Release(2).ok());
  EXPECT_EQ(UsedPages(), kRow);
  EXPECT_EQ(ValueAt(4, 15), 11);
  ASSERT_TRUE(store_->Release(4).ok());
  EXPECT_EQ(UsedPages(), 0);
}

TEST_F(SharedPagesTest, RanksOfAnotherNumberTakeTheirHeads) {
  MakeSource();
  EXPECT_EQ(*store_->OpenFrom(Spec(2, 2), {.sequence = 1, .tokens = 32}), 32);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(store_->Watermark(2, rank), 32);
    const auto reserved =
        store_->Reserve({.sequence = 2, .rank = rank, .heads = {rank, 1}, .num_pages = 3}, true);
    EXPECT_TRUE(reserved.ok()) << reserved.status();
  }
  const auto other = store_->Reserve({.sequence = 2, .heads = {1, 1}, .num_pages = 1}, true);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("belongs to rank 1"));
}

TEST_F(SharedPagesTest, AForkHasTheOpenPageTooAsACopy) {
  MakeSource();
  EXPECT_EQ(*store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = kTokens, .fork = true}), kTokens);
  EXPECT_EQ(UsedPages(), 4 * kRow);
  EXPECT_EQ(ValueAt(2, 39), 11);
  for (const SequenceId id : {1, 2}) ASSERT_TRUE(store_->Extend(id, 1000).ok());
  Fill(1, kTokens, 45, 33);
  Fill(2, kTokens, 45, 44);
  EXPECT_EQ(ValueAt(1, 44), 33);
  EXPECT_EQ(ValueAt(2, 44), 44);
  EXPECT_EQ(UsedPages(), 4 * kRow);
}

// Copy on write.
TEST_F(SharedPagesTest, WhoGoesBackIntoASharedPageGetsACopy) {
  MakeSource();
  EXPECT_EQ(*store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = kTokens, .fork = true}), kTokens);
  for (const SequenceId id : {2, 1}) {
    ASSERT_TRUE(store_->Truncate(id, 20).ok());
    ASSERT_TRUE(store_->Extend(id, 1000).ok());
    const auto value = static_cast<uint8_t>(50 + id);
    Fill(id, 20, 28, value);
    EXPECT_EQ(ValueAt(id, 19), 11);
    EXPECT_EQ(ValueAt(id, 27), value);
    store_->StopWriter(id, 0);
  }
  EXPECT_EQ(ValueAt(2, 27), 52);
  EXPECT_EQ(UsedPages(), kRow + 2 * kRow) << "the first page is shared, the second is not";
  ASSERT_TRUE(store_->Release(1).ok());
  ASSERT_TRUE(store_->Release(2).ok());
  EXPECT_EQ(UsedPages(), 0);
}

TEST_F(SharedPagesTest, ARestartKnowsWhoHoldsWhat) {
  MakeSource();
  EXPECT_EQ(*store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = kTokens, .fork = true}), kTokens);
  EXPECT_EQ(*store_->OpenFrom(Spec(3), {.sequence = 2, .tokens = 32}), 32);
  Restart();
  EXPECT_EQ(UsedPages(), 4 * kRow);
  EXPECT_EQ(store_->Stats().shared_pages, 2 * kRow);
  ASSERT_TRUE(store_->Release(1).ok());
  Restart();
  EXPECT_EQ(UsedPages(), 3 * kRow);
  EXPECT_EQ(ValueAt(2, 39), 11);
  EXPECT_EQ(ValueAt(3, 31), 11);
  ASSERT_TRUE(store_->Release(2).ok());
  ASSERT_TRUE(store_->Release(3).ok());
  EXPECT_EQ(UsedPages(), 0);
  Restart();
  EXPECT_EQ(UsedPages(), 0);
}

TEST_F(SharedPagesTest, OnlyWhatIsCommittedAndWholeIsShared) {
  ASSERT_TRUE(store_->Open(Spec(1)).ok());
  EXPECT_EQ(*store_->PrepareShare(1, 100, true), 0);
  Fill(1, 0, 31, 11);
  EXPECT_EQ(*store_->PrepareShare(1, 100, true), 16);
  Fill(1, 31, 48, 11);
  EXPECT_EQ(*store_->PrepareShare(1, 100, true), 48);
  EXPECT_EQ(*store_->PrepareShare(1, 47, true), 32);
  // A page that has changed since it was sealed.
  const auto reserved = store_->Reserve({.sequence = 1, .heads = {0, 2}, .num_pages = 3}, true);
  *store_->slab().At(reserved->offsets[4]) ^= std::byte{1};
  EXPECT_EQ(*store_->PrepareShare(1, 100, true), 16);
  EXPECT_EQ(store_->Stats().checksum_failures, 1);
  EXPECT_EQ(*store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = 48}), 16);
  EXPECT_EQ(store_->PrepareShare(9, 16, true).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SharedPagesTest, AnotherShapeOrFingerprintIsRefusedByName) {
  MakeSource();
  SequenceSpec spec = Spec(2);
  spec.fingerprint = 8;
  const PageSource source = {.sequence = 1, .tokens = 32};
  EXPECT_THAT(std::string(store_->OpenFrom(spec, source).status().message()),
              HasSubstr("fingerprint is 8, the sequence with the pages has 7"));
  spec = Spec(2);
  spec.geometry.row_bytes = 128;
  EXPECT_THAT(std::string(store_->OpenFrom(spec, source).status().message()),
              HasSubstr("row_bytes is 128"));
  EXPECT_EQ(store_->OpenFrom(Spec(1), source).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store_->OpenFrom(Spec(2), {.sequence = 9, .tokens = 32}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(UsedPages(), 3 * kRow);
}

// The cell lies in memory of the rank's: what it does there must not end the service.
TEST_F(SharedPagesTest, ARankThatMovesItsWatermarkWhileItReservesGetsPagesAllTheSame) {
  MakeSource();
  std::atomic<int64_t> nowhere = 0;
  std::atomic<std::atomic<int64_t>*> watermark = &nowhere;
  std::atomic<int64_t> moves = 0;
  std::atomic<bool> stop = false;
  std::thread rank([&] {
    for (; !stop; ++moves) watermark.load()->store(moves % 2 * 32);
  });
  for (SequenceId id = 2; id < 400; ++id) {
    ASSERT_EQ(*store_->OpenFrom(Spec(id), {.sequence = 1, .tokens = 32}), 32);
    const PageRange range = {.sequence = id, .heads = {0, 2}, .num_pages = 2};
    const auto first = store_->Reserve(range, true);
    ASSERT_TRUE(first.ok()) << first.status();
    watermark = &store_->slab().Watermark(first->watermark_offset);
    const int64_t before = moves;
    while (moves < before + 2) {
    }
    const auto again = store_->Reserve(range, true);
    watermark = &nowhere;
    const int64_t after = moves;
    while (moves < after + 2) {
    }
    EXPECT_TRUE(again.ok()) << again.status();
    store_->StopWriter(id, 0);
    ASSERT_TRUE(store_->Release(id).ok());
  }
  stop = true;
  rank.join();
  EXPECT_EQ(UsedPages(), 3 * kRow);
  EXPECT_EQ(ValueAt(1, 20), 11);
}

TEST_F(SharedPagesTest, PagesOfSeveralAreFreedByTheLastOfThem) {
  MakeSource();
  ASSERT_TRUE(store_->OpenFrom(Spec(2), {.sequence = 1, .tokens = 32}).ok());
  Fill(2, 32, 50, 22);
  store_->StopWriter(2, 0);
  const auto pages = [](int64_t rows) { return rows * kRow * kTestPageBytes; };
  EXPECT_THAT(store_->FreedBytes({{1, 2}}), ElementsAre(pages(1), pages(2 + 2)));
  EXPECT_THAT(store_->FreedBytes({{2, 1}}), ElementsAre(pages(2), pages(2 + 1)));
  EXPECT_THAT(store_->FreedBytes({{2}}), ElementsAre(pages(2)));
  EXPECT_THAT(store_->FreedBytes({{9, 1}}), ElementsAre(0, pages(1)));
  EXPECT_EQ(store_->HostBytesTogether({{1, 2}}), pages(2 + 1 + 2));
  EXPECT_EQ(store_->HostBytesTogether({{2, 9}}), pages(2 + 2));
}

TEST_F(SharedPagesTest, WithoutRoomNothingIsShared) {
  MakeSource();
  ASSERT_TRUE(store_->Open(Spec(2)).ok());
  Fill(2, 0, 16 * 10, 1);
  SequenceSpec large = Spec(3);
  large.prompt_tokens = 16 * 5;
  const auto refused = store_->OpenFrom(large, {.sequence = 1, .tokens = 32});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->Stats().shared_pages, 0);
  // Of three pages two are there.
  large.prompt_tokens = 16 * 3;
  EXPECT_EQ(*store_->OpenFrom(large, {.sequence = 1, .tokens = 32}), 32);
  EXPECT_EQ(store_->Stats().promised_bytes, kRow * kTestPageBytes);
}

}  // namespace
}  // namespace heavywater
