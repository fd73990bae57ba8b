// Pages of a sequence that goes on rest, go to disk and come back.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include "tests/worker/server/remote_host_tier_fixture.h"

namespace heavywater {
namespace {

class RemoteHostTierRestTest : public RemoteHostTierTest {
 protected:
  RemoteHostTierRestTest() : disk_(absl::StrCat(::testing::TempDir(), "/resting-", getpid())) {
    std::filesystem::create_directories(disk_);
    service_.Stop();
    service_.config().set_disk_path(disk_);
    service_.config().set_disk_bytes(64 << 20);
    service_.config().set_host_bytes(10 * kTierPageRow);
    service_.Start();
  }
  ~RemoteHostTierRestTest() override {
    tier_.reset();
    service_.Stop();
    std::filesystem::remove_all(disk_);
  }
  static std::vector<PageId> Pages(int64_t first, int64_t end) {
    std::vector<PageId> pages;
    for (int64_t page = first; page < end; ++page) {
      for (int layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < 2; ++head) pages.push_back({layer, head, page});
      }
    }
    return pages;
  }
  bool Holds(SequenceId sequence, const PageId& page, int value) {
    const std::byte* const memory = tier_->Page(sequence, page.layer, page.kv_head, page.page);
    return memory != nullptr && memory[0] == static_cast<std::byte>(value) &&
           memory[kTestPageSize - 1] == static_cast<std::byte>(value);
  }
  // The clock of leases goes on, so that heartbeats are newer than what was told.
  bool EventuallyLater(const std::function<bool()>& condition) {
    return Eventually([&] {
      clock_.Advance(absl::Milliseconds(5));
      return condition();
    });
  }

  static constexpr int64_t kTestPageSize = 4096;
  const std::string disk_;
};

TEST_F(RemoteHostTierRestTest, PagesOfOneSequenceMakeRoomForAnotherAndComeBack) {
  Join(/*heartbeats=*/true, {.reserve_ahead_tokens = 0});
  const SequenceId first = Open(/*max_tokens=*/144);  // nothing is reserved ahead
  ASSERT_TRUE(tier_->Reserve(first, 0, 9).ok());
  ASSERT_TRUE(Write(first, 0, 144, 7));
  tier_->Publish(first, 144);
  EXPECT_TRUE(tier_->Page(first, 0, 0, 0) != nullptr);
  // 37 units of 40: 4 more than 75 % wait for the rank.
  ASSERT_TRUE(EventuallyLater([&] { return tier_->BytesToRest(first) > 0; }));
  const int64_t bytes = tier_->BytesToRest(first);
  EXPECT_GE(bytes, 6 * kTestPageSize);
  EXPECT_LE(bytes, 8 * kTestPageSize);
  const std::vector<PageId> pages = Pages(0, 2);
  tier_->Rest(first, pages);
  EXPECT_EQ(tier_->BytesToRest(first), 0) << "the service has not seen it";
  EXPECT_EQ(tier_->Page(first, 1, 1, 1), nullptr);
  EXPECT_TRUE(Holds(first, {1, 1, 2}, 7));
  const SequenceId second = Open(/*max_tokens=*/64);
  ASSERT_TRUE(EventuallyLater([&] { return tier_->Reserve(second, 0, 2).ok(); }));
  ASSERT_TRUE(Write(second, 0, 32, 9));
  tier_->Publish(second, 32);
  for (const PageId& page : pages)
    EXPECT_EQ(tier_->Page(first, page.layer, page.kv_head, page.page), nullptr);
  tier_->CloseSequence(second);
  ASSERT_TRUE(service_.Close(second).ok());
  tier_->Ask(first, pages);
  ASSERT_TRUE(EventuallyLater([&] {
    return std::all_of(pages.begin(), pages.end(),
                       [&](const PageId& page) { return Holds(first, page, 7); });
  }));
  EXPECT_TRUE(tier_->TakeGone(first).empty());
  EXPECT_TRUE(ReadsBack(first, 3, 7));
  tier_->Publish(first, 144);
}

TEST_F(RemoteHostTierRestTest, WhatIsNotWrittenAsAWholeOrNotInTheSlabStays) {
  for (const bool stream : {false, true}) {
    Join(/*heartbeats=*/true, {.disable_slab = stream, .reserve_ahead_tokens = 0});
    const SequenceId sequence = Open(/*max_tokens=*/64);
    ASSERT_TRUE(tier_->Reserve(sequence, 0, 3).ok());
    ASSERT_TRUE(Write(sequence, 0, 40, 7));
    tier_->Publish(sequence, 40);
    ASSERT_TRUE(tier_->Flush(absl::Seconds(10)));
    tier_->Rest(sequence, Pages(0, 3));
    EXPECT_EQ(tier_->Page(sequence, 0, 0, 0) == nullptr, !stream);
    EXPECT_NE(tier_->Page(sequence, 0, 0, 2), nullptr);
    tier_->Publish(sequence, 40);
    EXPECT_EQ(tier_->BytesToRest(sequence), 0) << "there is room";
  }
}

// A page that was never told to rest is there again at once; one that is asked for twice comes
// once.
TEST_F(RemoteHostTierRestTest, AskingForPagesThatLieInTheSlabStillGivesThemBack) {
  Join(/*heartbeats=*/true, {.reserve_ahead_tokens = 0});
  const SequenceId sequence = Open(/*max_tokens=*/64);
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 2).ok());
  ASSERT_TRUE(Write(sequence, 0, 32, 7));
  tier_->Publish(sequence, 32);
  const std::byte* const before = tier_->Page(sequence, 1, 0, 1);
  tier_->Rest(sequence, Pages(0, 2));
  absl::SleepFor(absl::Milliseconds(100));
  tier_->Ask(sequence, Pages(0, 2));
  tier_->Ask(sequence, Pages(1, 2));
  ASSERT_TRUE(EventuallyLater([&] { return Holds(sequence, {1, 0, 1}, 7); }));
  EXPECT_EQ(tier_->Page(sequence, 1, 0, 1), before);
  tier_->Ask(sequence, Pages(0, 2));
  EXPECT_TRUE(Holds(sequence, {1, 0, 1}, 7));
  tier_->Publish(sequence, 32);
}

}  // namespace
}  // namespace heavywater
