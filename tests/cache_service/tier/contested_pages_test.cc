// A rank goes on with another process while the one before stands still in the middle of a
// write, and wakes: what it writes is nobody's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/slab_view.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/tier/memory_state.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {
namespace {

constexpr int64_t kPageTokens = 16;
constexpr int64_t kWritten = 24;  // in the middle of the second page
constexpr int64_t kRowBytes = 256;
constexpr PageRange kRange = {
    .sequence = 1, .rank = 0, .heads = {0, 2}, .first_page = 0, .num_pages = 3};

class ContestedPagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    name_ = absl::StrCat("heavywater-contested-test-", getpid());
    auto slab = Slab::Create(name_, 64 * kTestPageBytes);
    ASSERT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    nonce_ = (*slab)->nonce();
    object_bytes_ = (*slab)->object_bytes();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    ASSERT_TRUE(
        store_
            ->Open({.sequence = 1, .fingerprint = 1, .geometry = kTestGeometry, .max_tokens = 100})
            .ok());
    first_ = Reserve();
    Write(first_, 0, kWritten, /*text=*/1);
  }
  ~ContestedPagesTest() override {
    store_.reset();
    RemoveStaleSlab(name_);
  }
  Reservation Reserve() {
    auto reserved = store_->Reserve(kRange, /*direct=*/true);
    EXPECT_TRUE(reserved.ok()) << reserved.status();
    return reserved.ok() ? *std::move(reserved) : Reservation();
  }
  static RowRange Row(int layer, int head, int64_t position) {
    return {1, layer, head, position, 1};
  }
  // Rows of another text are another sequence's in TestRows().
  static std::vector<std::byte> Bytes(RowRange row, SequenceId text) {
    row.sequence = text;
    return TestRows(row);
  }
  int64_t Offset(const Reservation& place, int layer, int head, int64_t position) const {
    return place.offsets.at(static_cast<size_t>((layer * 2 + head) * 3 + position / kPageTokens)) +
           position % kPageTokens * kRowBytes;
  }
  // As a rank does, in the slab.
  void Write(const Reservation& place, int64_t begin, int64_t end, SequenceId text) {
    for (int i = 0; i < 4; ++i) {
      for (int64_t position = begin; position < end; ++position) {
        const auto row = Bytes(Row(i / 2, i % 2, position), text);
        std::memcpy(store_->slab().At(Offset(place, i / 2, i % 2, position)), row.data(),
                    row.size());
      }
    }
    PublishWatermark(store_->slab().Watermark(place.watermark_offset), end);
  }
  void ExpectReads(int64_t begin, int64_t end, SequenceId text) {
    for (int i = 0; i < 4; ++i) {
      for (int64_t position = begin; position < end; ++position) {
        const RowRange row = Row(i / 2, i % 2, position);
        std::vector<std::byte> bytes(kRowBytes);
        const absl::Status read = store_->Read(row, bytes);
        ASSERT_TRUE(read.ok()) << read;
        ASSERT_EQ(bytes, Bytes(row, text)) << position;
      }
    }
  }
  // Another process with the slab: stands still in the middle of writing the next token's rows,
  // and when it wakes ends that step.
  pid_t StartWriterThatStandsStill() {
    const pid_t writer = fork();
    if (writer != 0) return writer;
    const auto view = SlabView::Map(name_, object_bytes_, nonce_, kSlabFormatVersion);
    if (!view.ok()) _exit(1);
    for (int i = 0; i < 4; ++i) {
      const auto row = Bytes(Row(i / 2, i % 2, kWritten), /*text=*/1);
      std::byte* const to = (*view)->At(Offset(first_, i / 2, i % 2, kWritten), kRowBytes);
      if (i == 2) raise(SIGSTOP);
      std::memcpy(to, row.data(), row.size());
    }
    PublishWatermark(*(*view)->Watermark(first_.watermark_offset), kWritten + 1);
    _exit(0);
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
  void GoBackTo(int64_t tokens) {
    const absl::Status contested = store_->Contest(1, 0, tokens);
    ASSERT_TRUE(contested.ok()) << contested;
    ASSERT_TRUE(store_->Truncate(1, tokens).ok());
  }

  std::string name_;
  uint64_t nonce_ = 0;
  int64_t object_bytes_ = 0;
  MemoryState state_;
  std::unique_ptr<HostPageStore> store_;
  Reservation first_;
};

TEST_F(ContestedPagesTest, AProcessThatWakesInTheMiddleOfAStepWritesIntoNothingThatIsRead) {
  const pid_t writer = StartWriterThatStandsStill();
  int status = 0;
  ASSERT_EQ(waitpid(writer, &status, WUNTRACED), writer);
  ASSERT_TRUE(WIFSTOPPED(status));
  // Its successor goes on from before, with another text, past where it stands.
  GoBackTo(20);
  const Reservation second = Reserve();
  EXPECT_EQ(store_->Watermark(1, 0), 20);
  Write(second, 20, kWritten + 1, /*text=*/2);
  ASSERT_EQ(kill(writer, SIGCONT), 0);
  ASSERT_EQ(waitpid(writer, &status, 0), writer);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(store_->slab().Watermark(first_.watermark_offset).load(), kWritten + 1) << "it wrote";
  EXPECT_EQ(store_->Watermark(1, 0), kWritten + 1);
  ExpectReads(0, 20, 1);
  ExpectReads(20, kWritten + 1, 2);
}

TEST_F(ContestedPagesTest, OnlyPagesThatAreNotFullGetAnotherPlace) {
  GoBackTo(20);
  const Reservation second = Reserve();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(second.offsets[i * 3], first_.offsets[i * 3]);
    EXPECT_NE(second.offsets[i * 3 + 1], first_.offsets[i * 3 + 1]);
    EXPECT_NE(second.offsets[i * 3 + 2], first_.offsets[i * 3 + 2]);
  }
  EXPECT_NE(second.watermark_offset, first_.watermark_offset);
  EXPECT_EQ(Reserve().offsets, second.offsets) << "once";
  ExpectReads(0, 20, 1);
}

TEST_F(ContestedPagesTest, WhatTheOtherCanReachIsUsedAgainWhenItWritesNoMore) {
  const int64_t before = store_->Stats().used_bytes;
  GoBackTo(20);
  Reserve();
  const PageStoreStats contested = store_->Stats();
  EXPECT_EQ(contested.retiring_bytes, 8 * kTestPageBytes);
  EXPECT_EQ(contested.used_bytes, before + 9 * kTestPageBytes) << "and a watermark";
  EXPECT_EQ(contested.pages, 12 + 8);
  store_->EndContest(1);
  EXPECT_EQ(store_->Stats().retiring_bytes, 0);
  EXPECT_EQ(store_->Stats().used_bytes, before + kTestPageBytes);
  EXPECT_EQ(store_->Stats().pages, 12);
  ExpectReads(0, 20, 1);
}

TEST_F(ContestedPagesTest, PagesThatTheNextProcessGivesUpStayUntilTheOneBeforeHasStopped) {
  GoBackTo(20);
  const int64_t used = store_->Stats().used_bytes;
  EXPECT_EQ(*store_->Abort(1, 0), 0);
  EXPECT_EQ(store_->Stats().used_bytes, used);
  store_->EndContest(1);
  EXPECT_EQ(store_->Stats().used_bytes, used - 4 * kTestPageBytes);
}

TEST_F(ContestedPagesTest, AnEndedSequenceKeepsThemUntilItsWritersHaveStopped) {
  GoBackTo(20);
  Reserve();
  ASSERT_TRUE(store_->Release(1).ok());
  store_->EndContest(1);
  EXPECT_GT(store_->Stats().used_bytes, 0) << "the next process may still write";
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_TRUE(state_.Records().empty());
}

TEST_F(ContestedPagesTest, OneThatIsReplacedTwiceLeavesTwoCopies) {
  GoBackTo(20);
  const Reservation second = Reserve();
  Write(second, 20, 22, /*text=*/2);
  GoBackTo(21);
  const Reservation third = Reserve();
  EXPECT_NE(third.watermark_offset, second.watermark_offset);
  EXPECT_NE(third.offsets[1], second.offsets[1]);
  EXPECT_NE(third.offsets[1], first_.offsets[1]);
  ExpectReads(0, 20, 1);
  ExpectReads(20, 21, 2);
  store_->StopWriter(1, 0);
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

TEST_F(ContestedPagesTest, OneThatIsReplacedBeforeItGetsPagesLeavesNothing) {
  GoBackTo(20);
  const int64_t used = store_->Stats().used_bytes;
  GoBackTo(8);
  EXPECT_EQ(store_->Stats().used_bytes, used);
  const Reservation third = Reserve();
  for (int i = 0; i < 12; ++i) EXPECT_NE(third.offsets[i], first_.offsets[i]);
  EXPECT_NE(third.watermark_offset, first_.watermark_offset);
  ExpectReads(0, 8, 1);
  store_->EndContest(1);
  EXPECT_EQ(store_->Stats().retiring_bytes, 0);
}

TEST_F(ContestedPagesTest, ARestartOfTheServiceKnowsThem) {
  GoBackTo(20);
  const Reservation second = Reserve();
  GoBackTo(20);  // contested, and not reserved again yet
  const PageStoreStats before = store_->Stats();
  Restart();
  EXPECT_EQ(store_->Stats().used_bytes, before.used_bytes);
  EXPECT_EQ(store_->Stats().pages, before.pages);
  EXPECT_EQ(store_->Stats().retiring_bytes, before.retiring_bytes);
  EXPECT_EQ(store_->Watermark(1, 0), 20);
  const Reservation third = Reserve();
  EXPECT_NE(third.offsets[1], second.offsets[1]);
  ExpectReads(0, 20, 1);
  store_->EndContest(1);
  EXPECT_EQ(store_->Stats().retiring_bytes, 0);
  store_->StopWriter(1, 0);
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

TEST_F(ContestedPagesTest, WhereTheOneBeforeHasStoppedNothingIsCopied) {
  store_->StopWriter(1, 0);
  ASSERT_TRUE(store_->Extend(1, 100).ok());
  const int64_t used = store_->Stats().used_bytes;
  ASSERT_TRUE(store_->Contest(1, 0, kWritten).ok());
  const Reservation second = Reserve();
  EXPECT_EQ(second.offsets, first_.offsets);
  EXPECT_EQ(second.watermark_offset, first_.watermark_offset);
  EXPECT_EQ(store_->Stats().used_bytes, used);
}

}  // namespace
}  // namespace heavywater
