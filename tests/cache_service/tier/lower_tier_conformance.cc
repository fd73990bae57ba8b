#include "tests/cache_service/tier/lower_tier_conformance.h"

#include <gmock/gmock.h>

#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

using ::testing::HasSubstr;

std::vector<std::byte> TestPage(const PageKey& key, size_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(key.sequence * 1000003 + key.page * 7919 +
                                            key.layer * 101 + key.kv_head));
  std::vector<std::byte> page(bytes);
  for (std::byte& byte : page) byte = static_cast<std::byte>(random());
  return page;
}

absl::Status PutTestPage(LowerTier& tier, const PageKey& key, size_t bytes) {
  const std::vector<std::byte> page = TestPage(key, bytes);
  const PageCopy copy = {key, page, Crc32c(page)};
  const std::vector<absl::Status> statuses = tier.Put({&copy, 1});
  EXPECT_EQ(statuses.size(), 1u);
  return statuses.at(0);
}

absl::StatusOr<std::vector<std::byte>> GetPage(LowerTier& tier, const PageKey& key, size_t bytes) {
  std::vector<std::byte> page(bytes);
  HW_ASSIGN_OR_RETURN(const uint32_t crc, tier.Get(key, page));
  EXPECT_EQ(crc, Crc32c(page));
  return page;
}

void LowerTierConformance::Make(int64_t total_bytes) {
  std::string reason;
  tier_ = GetParam().make(total_bytes, &reason);
  if (tier_ == nullptr) GTEST_SKIP() << reason;
}

void LowerTierConformance::ExpectBalanced() const {
  const LowerTierStats stats = tier_->Stats();
  EXPECT_EQ(stats.free_bytes + stats.used_bytes, stats.total_bytes);
  EXPECT_GE(stats.free_bytes, 0);
  EXPECT_EQ(stats.used_bytes, stats.pages * StoredBytes(kPageBytes));
}

namespace {

// Make() may skip the test.
#define HW_MAKE_OR_SKIP(total_bytes) \
  Make(total_bytes);                 \
  if (tier_ == nullptr) return

TEST_P(LowerTierConformance, WhatWasPutComesBackBitForBit) {
  HW_MAKE_OR_SKIP(64 << 20);
  const std::vector<PageKey> keys = {
      TestKey(1, 0),       TestKey(1, 1), TestKey(1, 0, 1),
      TestKey(1, 0, 0, 1), TestKey(2, 0), TestKey(uint64_t{1} << 53, 1 << 30, 1023, 1023)};
  std::vector<std::vector<std::byte>> pages;
  std::vector<PageCopy> copies;
  for (const PageKey& key : keys) {
    pages.push_back(TestPage(key, kPageBytes));
    copies.push_back({key, pages.back(), Crc32c(pages.back())});
  }
  for (const absl::Status& status : tier_->Put(copies)) EXPECT_TRUE(status.ok()) << status;
  for (const PageKey& key : keys) {
    const auto page = Get(key);
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(*page, TestPage(key, kPageBytes)) << Describe(key);
  }
  EXPECT_EQ(tier_->Stats().pages, 6);
  ExpectBalanced();
}

TEST_P(LowerTierConformance, WhatIsNotThereIsAMiss) {
  HW_MAKE_OR_SKIP(64 << 20);
  ASSERT_TRUE(Put(TestKey(1, 3)).ok());
  constexpr auto kMiss = absl::StatusCode::kNotFound;
  EXPECT_EQ(Get(TestKey(1, 2)).status().code(), kMiss);
  EXPECT_EQ(Get(TestKey(2, 3)).status().code(), kMiss);
  EXPECT_EQ(Get(TestKey(1, 3, 1)).status().code(), kMiss);
  PageKey other_model = TestKey(1, 3);
  other_model.fingerprint = 7;
  const absl::Status miss = Get(other_model).status();
  EXPECT_EQ(miss.code(), kMiss) << "another fingerprint's bytes are never returned";
  EXPECT_THAT(std::string(miss.message()), HasSubstr("page 3 of sequence 1"));
}

TEST_P(LowerTierConformance, APageThatIsPutAgainIsReplacedAndCountedOnce) {
  HW_MAKE_OR_SKIP(64 << 20);
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  const std::vector<std::byte> other(kPageBytes, std::byte{42});
  const PageCopy copy = {TestKey(1, 0), other, Crc32c(other)};
  ASSERT_TRUE(tier_->Put({&copy, 1}).at(0).ok());
  EXPECT_EQ(*Get(TestKey(1, 0)), other);
  EXPECT_EQ(tier_->Stats().pages, 1);
  ExpectBalanced();
}

TEST_P(LowerTierConformance, ErasedPagesAreGoneAndTheirRoomIsFree) {
  HW_MAKE_OR_SKIP(64 << 20);
  for (int64_t page = 0; page < 4; ++page) ASSERT_TRUE(Put(TestKey(1, page)).ok());
  ASSERT_TRUE(Put(TestKey(2, 0)).ok());
  const std::vector<PageKey> some = {TestKey(1, 1), TestKey(1, 9)};
  ASSERT_TRUE(tier_->Erase(some).ok());
  EXPECT_EQ(Get(TestKey(1, 1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*Get(TestKey(1, 2)), TestPage(TestKey(1, 2), kPageBytes));
  EXPECT_EQ(tier_->Stats().pages, 4);
  ASSERT_TRUE(tier_->EraseSequence(1).ok());
  ASSERT_TRUE(tier_->EraseSequence(99).ok());
  EXPECT_EQ(Get(TestKey(1, 2)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*Get(TestKey(2, 0)), TestPage(TestKey(2, 0), kPageBytes));
  EXPECT_EQ(tier_->Stats().pages, 1);
  ExpectBalanced();
}

TEST_P(LowerTierConformance, AFullTierRefusesNamingNeedAndLimitAndKeepsWhatItHas) {
  HW_MAKE_OR_SKIP(2 * StoredBytes(kPageBytes) + 100);
  std::vector<std::vector<std::byte>> pages;
  std::vector<PageCopy> copies;
  for (int64_t page = 0; page < 3; ++page) {
    pages.push_back(TestPage(TestKey(1, page), kPageBytes));
    copies.push_back({TestKey(1, page), pages.back(), Crc32c(pages.back())});
  }
  const std::vector<absl::Status> statuses = tier_->Put(copies);
  EXPECT_TRUE(statuses.at(0).ok());
  EXPECT_TRUE(statuses.at(1).ok()) << "a page that fits is not refused for one that does not";
  EXPECT_EQ(statuses.at(2).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(statuses.at(2).message()),
              ::testing::AllOf(HasSubstr("need 65588 bytes"), HasSubstr("100 are free of 131276")));
  EXPECT_EQ(*Get(TestKey(1, 1)), pages[1]);
  EXPECT_EQ(Get(TestKey(1, 2)).status().code(), absl::StatusCode::kNotFound);
  ExpectBalanced();
  ASSERT_TRUE(tier_->EraseSequence(1).ok());
  EXPECT_TRUE(Put(TestKey(1, 2)).ok()) << "erased room is used again";
}

TEST_P(LowerTierConformance, ImpossibleKeysAreRefusedNamingTheField) {
  HW_MAKE_OR_SKIP(64 << 20);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(Put(TestKey(1, -1)).code(), kInvalid);
  EXPECT_THAT(std::string(Put(TestKey(1, 0, 1024)).message()), HasSubstr("layer is 1024"));
  EXPECT_EQ(Put(TestKey(1, 0, 0, -1)).code(), kInvalid);
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  PageKey other_model = TestKey(1, 1);
  other_model.fingerprint = 7;
  EXPECT_EQ(Put(other_model).code(), kInvalid) << "a sequence has one fingerprint";
  EXPECT_EQ(tier_->Stats().pages, 1);
  ExpectBalanced();
}

TEST_P(LowerTierConformance, APageOfAnotherSizeIsDataLossNotOtherBytes) {
  HW_MAKE_OR_SKIP(64 << 20);
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  EXPECT_EQ(GetPage(*tier_, TestKey(1, 0), kPageBytes - 256).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_P(LowerTierConformance, BytesThatDoNotMatchTheirSealAreDataLoss) {
  HW_MAKE_OR_SKIP(64 << 20);
  const std::vector<std::byte> page = TestPage(TestKey(1, 0), kPageBytes);
  const PageCopy copy = {TestKey(1, 0), page, Crc32c(page) ^ 1};
  ASSERT_TRUE(tier_->Put({&copy, 1}).at(0).ok());
  const absl::Status damaged = Get(TestKey(1, 0)).status();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.message()), HasSubstr("its checksum is"));
}

TEST_P(LowerTierConformance, ThreadsGetTheirOwnPagesWhileOthersComeAndGo) {
  HW_MAKE_OR_SKIP(64 << 20);
  std::atomic<int> wrong = 0;
  const auto churn = [&](SequenceId sequence) {
    for (int round = 0; round < 20; ++round) {
      for (int64_t page = 0; page < 3; ++page) {
        if (!Put(TestKey(sequence, page)).ok()) ++wrong;
      }
      for (int64_t page = 0; page < 3; ++page) {
        const auto got = Get(TestKey(sequence, page));
        if (!got.ok() || *got != TestPage(TestKey(sequence, page), kPageBytes)) ++wrong;
      }
      if (!tier_->EraseSequence(sequence).ok()) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (SequenceId sequence = 1; sequence <= 4; ++sequence) threads.emplace_back(churn, sequence);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(tier_->Stats().pages, 0);
  ExpectBalanced();
}

}  // namespace
}  // namespace heavywater
