#include "cache_service/tier/local_host_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr PageGeometry kGeometry = {
    .num_layers = 2, .num_kv_heads = 3, .page_tokens = 16, .row_bytes = 8};
constexpr int64_t kRowBytes = 2 * 2 * 16 * 8;  // layers, heads of the rank, rows, bytes

TEST(LocalHostTierTest, EveryPageOfARankIsMemoryOfItsOwn) {
  LocalHostTier tier(1 << 20);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 1, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 3).ok());
  uint8_t fill = 0;
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 1; head < 3; ++head)
      for (int page = 0; page < 3; ++page)
        std::memset(tier.Page(1, layer, head, page), ++fill, kGeometry.page_bytes());
  fill = 0;
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 1; head < 3; ++head)
      for (int page = 0; page < 3; ++page) {
        ++fill;
        EXPECT_EQ(static_cast<uint8_t>(tier.Page(1, layer, head, page)[0]), fill);
        EXPECT_EQ(static_cast<uint8_t>(tier.Page(1, layer, head, page)[127]), fill);
      }
}

TEST(LocalHostTierTest, WhatIsNotReservedOrNotOfTheRankIsNull) {
  LocalHostTier tier(1 << 20);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 1, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 1).ok());
  EXPECT_NE(tier.Page(1, 0, 1, 0), nullptr);
  EXPECT_EQ(tier.Page(1, 0, 0, 0), nullptr);
  EXPECT_EQ(tier.Page(1, 0, 3, 0), nullptr);
  EXPECT_EQ(tier.Page(1, 2, 1, 0), nullptr);
  EXPECT_EQ(tier.Page(1, 0, 1, 1), nullptr);
  EXPECT_EQ(tier.Page(2, 0, 1, 0), nullptr);
}

TEST(LocalHostTierTest, AReservationIsAllOrNothingAndNamesNeedAndLimit) {
  LocalHostTier tier(2 * kRowBytes);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 1).ok());
  const absl::Status full = tier.Reserve(1, 0, 3);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("need 1024 bytes, 512 are free of 1024"));
  EXPECT_EQ(tier.Page(1, 0, 0, 1), nullptr);
  EXPECT_EQ(tier.reserved_bytes(), kRowBytes);
  EXPECT_TRUE(tier.Reserve(1, 0, 2).ok()) << "what is reserved already is not counted twice";
}

TEST(LocalHostTierTest, ReservingAgainKeepsTheBytes) {
  LocalHostTier tier(1 << 20);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 1}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 1).ok());
  std::byte* page = tier.Page(1, 1, 0, 0);
  std::memset(page, 7, 128);
  ASSERT_TRUE(tier.Reserve(1, 0, 20).ok());
  EXPECT_EQ(tier.Page(1, 1, 0, 0), page);
  EXPECT_EQ(static_cast<int>(page[5]), 7);
}

TEST(LocalHostTierTest, ASkippedPageHasNoMemoryAndNeverGetsAny) {
  LocalHostTier tier(1 << 20);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 2).ok());
  tier.Skip(1, 1, 2);  // one that has come and one that has not
  EXPECT_EQ(tier.reserved_bytes(), kRowBytes);
  EXPECT_EQ(tier.Page(1, 0, 0, 1), nullptr);
  const absl::Status refused = tier.Reserve(1, 2, 2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("page 2 of sequence 1"));
  EXPECT_TRUE(tier.Reserve(1, 3, 1).ok());
  EXPECT_FALSE(tier.IsLost(1));
  tier.CloseSequence(1);
  EXPECT_EQ(tier.reserved_bytes(), 0);
}

TEST(LocalHostTierTest, ClosingGivesEverythingBack) {
  LocalHostTier tier(kRowBytes);
  for (int cycle = 0; cycle < 100; ++cycle) {
    ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 2}).ok());
    EXPECT_EQ(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 2}).code(),
              absl::StatusCode::kAlreadyExists);
    ASSERT_TRUE(tier.Reserve(1, cycle, 1).ok());
    tier.CloseSequence(1);
    ASSERT_EQ(tier.reserved_bytes(), 0);
  }
  tier.CloseSequence(1);
  EXPECT_EQ(tier.Reserve(1, 0, 1).code(), absl::StatusCode::kNotFound);
}

TEST(LocalHostTierTest, TheWatermarkNeverGoesBack) {
  LocalHostTier tier(1 << 20);
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 0, .count = 1}).ok());
  tier.Publish(1, 9);
  tier.Publish(1, 4);
  EXPECT_EQ(tier.watermark(1), 9);
  EXPECT_EQ(tier.watermark(2), 0);
}

TEST(LocalHostTierTest, RefusesHeadsOutsideTheModel) {
  LocalHostTier tier(1 << 20);
  EXPECT_EQ(tier.OpenSequence(1, kGeometry, {.first = 2, .count = 2}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tier.OpenSequence(1, PageGeometry{}, {.first = 0, .count = 1}).code(),
            absl::StatusCode::kInvalidArgument);
}

// What a device would know of the tier's memory.
struct KnownMemory {
  HostMemoryHooks Hooks() {
    return {.on_allocated =
                [this](std::span<std::byte> memory) {
                  if (blocks.size() == room) return absl::ResourceExhaustedError("device: full");
                  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
                  EXPECT_EQ(memory.size() % 4096, 0u);
                  EXPECT_TRUE(blocks.emplace(memory.data(), memory.size()).second);
                  return absl::OkStatus();
                },
            .on_freeing =
                [this](std::span<std::byte> memory) {
                  if (keeps) return absl::InternalError("device: in use");
                  EXPECT_EQ(blocks[memory.data()], memory.size());
                  blocks.erase(memory.data());
                  return absl::OkStatus();
                }};
  }
  std::map<std::byte*, size_t> blocks;
  size_t room = 100;
  bool keeps = false;
};

TEST(LocalHostTierTest, ADeviceHearsOfEveryRowOfPagesUntilItIsFreed) {
  KnownMemory device;
  {
    LocalHostTier tier(1 << 20, device.Hooks());
    ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 1, .count = 2}).ok());
    ASSERT_TRUE(tier.OpenSequence(2, kGeometry, {.first = 1, .count = 2}).ok());
    ASSERT_TRUE(tier.Reserve(1, 0, 3).ok());
    ASSERT_TRUE(tier.Reserve(1, 0, 4).ok());
    ASSERT_TRUE(tier.Reserve(2, 0, 1).ok());
    EXPECT_EQ(device.blocks.size(), 5u);
    EXPECT_TRUE(device.blocks.contains(tier.Page(1, 0, 1, 2)));
    tier.Skip(1, 3, 1);
    EXPECT_EQ(device.blocks.size(), 4u);
    tier.CloseSequence(1);
    EXPECT_EQ(device.blocks.size(), 1u);
    EXPECT_EQ(tier.reserved_bytes(), kRowBytes);
  }
  EXPECT_TRUE(device.blocks.empty());
}

TEST(LocalHostTierTest, AReservationThatTheDeviceRefusesChangesNothingAndSaysWhatItSaid) {
  KnownMemory device;
  device.room = 2;
  LocalHostTier tier(1 << 20, device.Hooks());
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 1, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 1).ok());
  const absl::Status refused = tier.Reserve(1, 0, 3);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("4096 bytes: device: full"));
  EXPECT_EQ(device.blocks.size(), 1u);
  EXPECT_EQ(tier.reserved_bytes(), kRowBytes);
  EXPECT_EQ(tier.Page(1, 0, 1, 1), nullptr);
  EXPECT_NE(tier.Page(1, 0, 1, 0), nullptr);
  EXPECT_TRUE(tier.Reserve(1, 0, 2).ok());
}

TEST(LocalHostTierTest, MemoryThatTheDeviceDoesNotLetGoIsNeverUsedAgain) {
  KnownMemory device;
  LocalHostTier tier(1 << 20, device.Hooks());
  ASSERT_TRUE(tier.OpenSequence(1, kGeometry, {.first = 1, .count = 2}).ok());
  ASSERT_TRUE(tier.Reserve(1, 0, 1).ok());
  static std::byte* kept = nullptr;  // reachable, for leak checkers
  kept = tier.Page(1, 0, 1, 0);
  device.keeps = true;
  tier.CloseSequence(1);
  EXPECT_EQ(tier.stuck_bytes(), 4096);
  EXPECT_EQ(tier.reserved_bytes(), 0);
  std::memset(kept, 7, kRowBytes);  // still memory
}

}  // namespace
}  // namespace heavywater
