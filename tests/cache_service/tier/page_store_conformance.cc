#include "tests/cache_service/tier/page_store_conformance.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <thread>

#include "cache_service/base/status.h"

namespace heavywater {

using ::testing::HasSubstr;

std::vector<std::byte> TestRows(const RowRange& rows) {
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < rows.num_positions; ++i) {
    std::minstd_rand random(static_cast<uint32_t>(1 + rows.sequence * 1000003 + rows.layer * 10007 +
                                                  rows.kv_head * 101 +
                                                  (rows.first_position + i) * 7919));
    for (int b = 0; b < kTestGeometry.row_bytes; b += 2) {
      const auto bits = random();
      bytes.push_back(static_cast<std::byte>(bits >> 8));
      bytes.push_back(static_cast<std::byte>(bits >> 16));
    }
  }
  return bytes;
}

absl::Status PageStoreConformance::Open(SequenceId sequence, int64_t prompt_tokens, int num_ranks) {
  return store_->Open({.sequence = sequence,
                       .geometry = kTestGeometry,
                       .num_ranks = num_ranks,
                       .max_tokens = 1000,
                       .prompt_tokens = prompt_tokens});
}

absl::StatusOr<Reservation> PageStoreConformance::Reserve(SequenceId sequence, int64_t first_page,
                                                          int64_t num_pages, int rank) {
  return store_->Reserve({.sequence = sequence,
                          .rank = rank,
                          .heads = {.first = 0, .count = 2},
                          .first_page = first_page,
                          .num_pages = num_pages},
                         /*direct=*/false);
}

absl::Status PageStoreConformance::WriteAll(SequenceId sequence, int64_t tokens) {
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int64_t first = 0; first < tokens; first += 16) {
        HW_RETURN_IF_ERROR(
            Write(0, {sequence, layer, head, first, std::min<int64_t>(16, tokens - first)}));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> PageStoreConformance::Read(const RowRange& rows) {
  std::vector<std::byte> bytes(rows.num_positions * kTestGeometry.row_bytes);
  HW_RETURN_IF_ERROR(store_->Read(rows, bytes));
  return bytes;
}

void PageStoreConformance::ExpectBalanced() const {
  const PageStoreStats stats = store_->Stats();
  EXPECT_EQ(stats.free_bytes + stats.used_bytes, stats.total_bytes);
  EXPECT_GE(stats.free_bytes, 0);
  EXPECT_GE(stats.promised_bytes, 0);
  EXPECT_GE(stats.pages, 0);
}

namespace {

TEST_P(PageStoreConformance, WhatIsCommittedReadsBackBitForBit) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 3).ok());
  ASSERT_TRUE(WriteAll(1, 40).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 40).ok());
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (const RowRange& rows : {RowRange{1, layer, head, 0, 16}, RowRange{1, layer, head, 17, 3},
                                   RowRange{1, layer, head, 39, 1}}) {
        const auto bytes = Read(rows);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        EXPECT_EQ(*bytes, TestRows(rows));
      }
    }
  }
  EXPECT_EQ(store_->Stats().bytes_read, 4 * 20 * 256);
}

TEST_P(PageStoreConformance, NothingIsReadableBeforeCommitOrAboveIt) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  ASSERT_TRUE(WriteAll(1, 10).ok());
  EXPECT_EQ(Read({1, 0, 0, 0, 1}).status().code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(store_->Commit(1, 0, 9).ok());
  EXPECT_TRUE(Read({1, 0, 0, 0, 9}).ok());
  EXPECT_EQ(Read({1, 0, 0, 0, 10}).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(store_->Watermark(1, 0), 9);
  ASSERT_TRUE(store_->Commit(1, 0, 3).ok());
  EXPECT_EQ(store_->Watermark(1, 0), 9) << "a watermark never goes back";
}

TEST_P(PageStoreConformance, ACommitOverRowsThatWereNotWrittenIsRefusedNamingThePage) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  ASSERT_TRUE(WriteAll(1, 4).ok());
  ASSERT_TRUE(Write(0, {1, 0, 0, 4, 4}).ok());
  const absl::Status status = store_->Commit(1, 0, 8);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 0, kv_head 1 has 4 rows"));
  EXPECT_EQ(store_->Watermark(1, 0), 0);
  EXPECT_EQ(Read({1, 0, 0, 0, 1}).status().code(), absl::StatusCode::kOutOfRange);
  // The missing writes, tried again, make it whole.
  ASSERT_TRUE(WriteAll(1, 8).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 8).ok());
  EXPECT_EQ(*Read({1, 1, 1, 0, 8}), TestRows({1, 1, 1, 0, 8}));
}

TEST_P(PageStoreConformance, RowsOfAPageComeInOrderAndCommittedRowsDoNotChange) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  EXPECT_EQ(Write(0, {1, 0, 0, 2, 1}).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(WriteAll(1, 4).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 4).ok());
  EXPECT_TRUE(Write(0, {1, 0, 0, 0, 4}).ok()) << "a replay of the same bytes";
  const std::vector<std::byte> other(256, std::byte{9});
  EXPECT_EQ(store_->Write(0, {1, 0, 0, 2, 1}, other).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*Read({1, 0, 0, 0, 4}), TestRows({1, 0, 0, 0, 4}));
}

TEST_P(PageStoreConformance, ReservationsAreAllOrNothingAndNameNeedFreeAndLimit) {
  Make(20 * kTestPageBytes);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  const int64_t used = store_->Stats().used_bytes;
  const auto refused = Reserve(1, 0, 6);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              ::testing::AllOf(HasSubstr("need 65536 bytes"), HasSubstr("45056 are free"),
                               HasSubstr("of 81920")));
  EXPECT_EQ(store_->Stats().used_bytes, used);
  EXPECT_EQ(store_->Stats().reservations_refused, 1);
  EXPECT_EQ(Write(0, {1, 0, 0, 32, 1}).code(), absl::StatusCode::kNotFound);
  ExpectBalanced();
}

TEST_P(PageStoreConformance, ReservingAgainReturnsTheSamePages) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  const auto first = Reserve(1, 0, 2);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->offsets.size(), 2u * 2 * 2);
  const auto again = Reserve(1, 0, 2);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->offsets, first->offsets);
  EXPECT_EQ(again->watermark_offset, first->watermark_offset);
  EXPECT_EQ(store_->Stats().pages, 8);
}

TEST_P(PageStoreConformance, ARankNeverGetsOrWritesThePagesOfAnother) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1, 0, /*num_ranks=*/2).ok());
  ASSERT_TRUE(Reserve(1, 0, 1, /*rank=*/0).ok());
  const auto other = Reserve(1, 0, 2, /*rank=*/1);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("belongs to rank 0"));
  EXPECT_EQ(Write(1, {1, 0, 0, 0, 1}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Stats().pages, 4);
}

TEST_P(PageStoreConformance, AdmissionHoldsRoomForAPromptAgainstOthers) {
  Make(22 * kTestPageBytes);
  ASSERT_TRUE(Open(1, /*prompt_tokens=*/48).ok());  // 12 pages and a unit of watermarks
  const absl::Status full = Open(2, /*prompt_tokens=*/48);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("need 53248 bytes"));
  ASSERT_TRUE(Open(3).ok());
  EXPECT_TRUE(Reserve(3, 0, 2).ok());
  EXPECT_EQ(Reserve(3, 2, 1).status().code(), absl::StatusCode::kResourceExhausted)
      << "the rest is held for the prompt of sequence 1";
  EXPECT_TRUE(Reserve(1, 0, 3).ok());
  EXPECT_EQ(store_->Stats().promised_bytes, 0);
  ExpectBalanced();
}

TEST_P(PageStoreConformance, WhatARankNoLongerNeedsForAPromptIsNotHeldForEver) {
  Make(22 * kTestPageBytes);
  ASSERT_TRUE(Open(1, /*prompt_tokens=*/48).ok());
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().promised_bytes, 0);
  EXPECT_TRUE(Open(2, /*prompt_tokens=*/48).ok());
}

TEST_P(PageStoreConformance, AbortGivesBackOnlyWhatIsAboveTheWatermark) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 4).ok());
  ASSERT_TRUE(WriteAll(1, 20).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 20).ok());
  const auto freed = store_->Abort(1, 0);
  ASSERT_TRUE(freed.ok());
  EXPECT_EQ(*freed, 2 * 2 * 2) << "pages 2 and 3 of two layers and heads";
  EXPECT_EQ(*store_->Abort(1, 0), 0);
  EXPECT_EQ(*Read({1, 1, 0, 16, 4}), TestRows({1, 1, 0, 16, 4}));
  EXPECT_TRUE(Reserve(1, 2, 2).ok());
  ExpectBalanced();
}

TEST_P(PageStoreConformance, APageBelowTheWatermarkCannotAppearLater) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 20).ok()) << "positions without a page are misses";
  EXPECT_EQ(Read({1, 0, 0, 0, 1}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(1, 1, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Reserve(1, 2, 1).ok());
}

TEST_P(PageStoreConformance, ASkippedPageIsAMissThatTheWatermarkPasses) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 3).ok());
  ASSERT_TRUE(WriteAll(1, 16).ok());
  const auto freed = store_->Skip(1, 0, 1, 1);
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_EQ(*freed, 2 * 2) << "page 1 of two layers and heads";
  EXPECT_EQ(store_->Stats().pages, 8);
  EXPECT_EQ(*store_->Skip(1, 0, 1, 1), 0) << "a replay";
  const auto again = Reserve(1, 0, 3);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition)
      << "a reservation that was on its way";
  EXPECT_THAT(std::string(again.status().message()), HasSubstr("page 1 was given up by rank 0"));
  ASSERT_TRUE(store_->Commit(1, 0, 32).ok());
  EXPECT_EQ(*Read({1, 1, 1, 0, 16}), TestRows({1, 1, 1, 0, 16}));
  const absl::Status miss = Read({1, 1, 0, 20, 3}).status();
  EXPECT_EQ(miss.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(miss.message()), HasSubstr("positions [16, 32)"));
  EXPECT_EQ(Read({1, 0, 0, 32, 1}).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(*store_->Skip(1, 0, 1, 1), 0) << "a replay after the watermark has passed it";
  EXPECT_EQ(Write(0, {1, 0, 0, 16, 1}).code(), absl::StatusCode::kNotFound);
  ExpectBalanced();
}

TEST_P(PageStoreConformance, OnlyPagesThatNobodyCanHaveReadMayBeSkipped) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1, 0, /*num_ranks=*/2).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(WriteAll(1, 17).ok());
  ASSERT_TRUE(store_->Commit(1, 0, 17).ok());
  const absl::Status read = store_->Skip(1, 0, 1, 1).status();
  EXPECT_EQ(read.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(read.message()),
              HasSubstr("page 1 begins below the rank's watermark 17"));
  EXPECT_EQ(*store_->Skip(1, 1, 0, 4), 0) << "pages of another rank stay";
  EXPECT_EQ(*Read({1, 0, 0, 16, 1}), TestRows({1, 0, 0, 16, 1}));
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(store_->Skip(1, 2, 0, 1).status().code(), kInvalid);
  EXPECT_EQ(store_->Skip(1, 0, -1, 1).status().code(), kInvalid);
  EXPECT_EQ(store_->Skip(1, 0, 2, 0).status().code(), kInvalid);
  EXPECT_EQ(store_->Skip(1, 0, 62, 2).status().code(), kInvalid) << "max_tokens is 1000";
  EXPECT_EQ(store_->Skip(1, 0, int64_t{1} << 62, int64_t{1} << 62).status().code(), kInvalid);
  EXPECT_EQ(store_->Skip(2, 0, 0, 1).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(PageStoreConformance, ARankIsAWriterOnceItHasReservedPages) {
  Make(1 << 20);
  EXPECT_FALSE(store_->IsWriter(1, 0));
  ASSERT_TRUE(Open(1, 0, /*num_ranks=*/2).ok());
  EXPECT_FALSE(store_->IsWriter(1, 0));
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  EXPECT_TRUE(store_->IsWriter(1, 0));
  EXPECT_FALSE(store_->IsWriter(1, 1));
  ASSERT_TRUE(store_->Abort(1, 0).ok());
  EXPECT_TRUE(store_->IsWriter(1, 0)) << "its watermark still counts";
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_FALSE(store_->IsWriter(1, 0));
}

TEST_P(PageStoreConformance, AReleasedSequenceIsGoneAndItsRoomIsFree) {
  Make(1 << 20);
  for (SequenceId sequence = 1; sequence <= 300; ++sequence) {
    ASSERT_TRUE(Open(sequence, 16).ok());
    ASSERT_TRUE(Reserve(sequence, 0, 2).ok());
    ASSERT_TRUE(store_->Release(sequence).ok());
    ASSERT_EQ(store_->Stats().used_bytes, 0);
  }
  EXPECT_EQ(store_->Release(1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Read({1, 0, 0, 0, 1}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(1, 0, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Commit(1, 0, 1).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Abort(1, 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Watermark(1, 0), 0);
  const PageStoreStats stats = store_->Stats();
  EXPECT_EQ(stats.sequences, 0);
  EXPECT_EQ(stats.pages, 0);
  EXPECT_EQ(stats.promised_bytes, 0);
}

TEST_P(PageStoreConformance, RequestsOutsideTheSequenceAreRefusedNamingTheField) {
  Make(1 << 20);
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  const auto code = [](const auto& result) { return result.status().code(); };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(Reserve(1, -1, 1)), kInvalid);
  EXPECT_EQ(code(Reserve(1, 0, 0)), kInvalid);
  EXPECT_EQ(code(Reserve(1, 62, 2)), kInvalid) << "1000 tokens are 63 pages";
  EXPECT_EQ(code(Reserve(1, int64_t{1} << 62, int64_t{1} << 62)), kInvalid);
  EXPECT_EQ(code(Reserve(1, 0, 1, /*rank=*/1)), kInvalid);
  EXPECT_EQ(store_->Open({.sequence = 3, .geometry = kTestGeometry, .max_tokens = 1 << 30}).code(),
            absl::StatusCode::kOk);
  EXPECT_EQ(code(Reserve(3, 0, 1 << 20)), kInvalid) << "the answer would not fit a message";
  EXPECT_EQ(code(Read({1, 2, 0, 0, 1})), kInvalid);
  EXPECT_EQ(code(Read({1, 0, -1, 0, 1})), kInvalid);
  EXPECT_EQ(code(Read({1, 0, 0, 15, 2})), kInvalid) << "two pages";
  EXPECT_EQ(code(Read({1, 0, 0, 1000, 1})), kInvalid);
  EXPECT_EQ(store_->Write(0, {1, 0, 0, 0, 1}, std::vector<std::byte>(255)).code(), kInvalid);
  EXPECT_EQ(store_->Commit(1, 0, 1001).code(), kInvalid);
  EXPECT_EQ(store_->Commit(1, 1, 1).code(), kInvalid);
  EXPECT_EQ(Open(1).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store_->Open({.sequence = 2, .geometry = kTestGeometry}).code(), kInvalid);
}

TEST_P(PageStoreConformance, ReadersOfAReusedPlaceGetTheirOwnBytesOrAnError) {
  Make(10 * kTestPageBytes);  // room for one sequence at a time
  std::atomic<bool> stop = false;
  std::atomic<SequenceId> current = 1;
  std::atomic<int64_t> good = 0;
  std::atomic<int64_t> foreign = 0;
  const auto read_forever = [&] {
    std::vector<std::byte> bytes(16 * 256);
    while (!stop) {
      const RowRange rows = {current, 1, 1, 0, 16};
      if (!store_->Read(rows, bytes).ok()) continue;
      ++(bytes == TestRows(rows) ? good : foreign);
    }
  };
  std::thread first(read_forever);
  std::thread second(read_forever);
  for (SequenceId sequence = 1; sequence <= 60; ++sequence) {
    ASSERT_TRUE(Open(sequence).ok());
    current = sequence;
    ASSERT_TRUE(Reserve(sequence, 0, 2).ok());
    ASSERT_TRUE(WriteAll(sequence, 32).ok());
    ASSERT_TRUE(store_->Commit(sequence, 0, 32).ok());
    const int64_t before = good;
    for (int i = 0; i < 100 && good == before; ++i) std::this_thread::yield();
    ASSERT_TRUE(store_->Release(sequence).ok());
  }
  stop = true;
  first.join();
  second.join();
  EXPECT_EQ(foreign, 0);
  EXPECT_GT(good, 0);
  ExpectBalanced();
}

TEST_P(PageStoreConformance, RandomTrafficKeepsTheStoreBalanced) {
  Make(60 * kTestPageBytes);
  std::mt19937 random(7);
  for (int step = 0; step < 5000; ++step) {
    const SequenceId sequence = 1 + random() % 4;
    switch (random() % 7) {
      case 0:
        (void)Open(sequence, random() % 64);
        break;
      case 1:
      case 2:
        (void)Reserve(sequence, random() % 4, 1 + random() % 4);
        break;
      case 3:
        (void)store_->Abort(sequence, 0);
        break;
      case 4:
        (void)store_->Commit(sequence, 0, random() % 64);
        break;
      case 5:
        (void)store_->Skip(sequence, 0, random() % 6, 1 + random() % 2);
        break;
      default:
        (void)store_->Release(sequence);
    }
    ExpectBalanced();
  }
  for (SequenceId sequence = 1; sequence <= 4; ++sequence) (void)store_->Release(sequence);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(store_->Stats().promised_bytes, 0);
}

TEST_P(PageStoreConformance, PagesThatRestStayReadableAndLieWhereTheyAreAskedFor) {
  Make(int64_t{64} << 12);
  ASSERT_TRUE(Open(1).ok());
  const auto reserved = Reserve(1, 0, 2);
  ASSERT_TRUE(reserved.ok());
  ASSERT_TRUE(WriteAll(1, 24).ok());
  const PageId full = {1, 0, 0};
  const PageId open = {1, 0, 1};
  EXPECT_EQ(store_->Rest(1, 0, {&full, 1}).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store_->Commit(1, 0, 24).ok());
  EXPECT_TRUE(store_->Rest(1, 0, {&full, 1}).ok());
  EXPECT_EQ(store_->Rest(1, 0, {&open, 1}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Stats().resting_pages, 1);
  EXPECT_TRUE(Read({1, 1, 0, 0, 16}).ok());
  const auto asked = store_->Ask(1, 0, {&full, 1});
  ASSERT_TRUE(asked.ok() && asked->at(0).ok());
  EXPECT_EQ(*asked->at(0), reserved->offsets[4]) << "[layer][head][page]";
  EXPECT_EQ(store_->Stats().resting_pages, 0);
  ExpectBalanced();
}

}  // namespace
}  // namespace heavywater
