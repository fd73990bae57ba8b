#include "cache_service/cluster/change_queue.h"

#include <gtest/gtest.h>

#include "tests/cache_service/registry/fake_clock.h"

namespace heavywater {
namespace {

class ChangeQueueTest : public testing::Test {
 protected:
  std::optional<SequenceId> Take() { return queue_.Take(absl::ZeroDuration()); }

  FakeClock clock_;
  ChangeQueue queue_{clock_};
};

TEST_F(ChangeQueueTest, WhatChangesTwiceIsTakenOnceTheFirstChangedFirst) {
  queue_.Add(7);
  clock_.Advance(absl::Seconds(1));
  queue_.Add(3);
  queue_.Add(7);
  EXPECT_EQ(queue_.size(), 2);
  EXPECT_EQ(Take(), 7u);
  queue_.Done();
  EXPECT_EQ(Take(), 3u);
  queue_.Done();
  EXPECT_EQ(Take(), std::nullopt);
}

TEST_F(ChangeQueueTest, WhatIsForLaterWaitsUnlessItChangesMeanwhile) {
  queue_.AddLater(1, absl::Seconds(10));
  EXPECT_EQ(Take(), std::nullopt);
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(Take(), 1u);
  queue_.Done();
  queue_.AddLater(1, absl::Seconds(10));
  queue_.Add(1);
  EXPECT_EQ(Take(), 1u);
}

TEST_F(ChangeQueueTest, ItsAgeIsThatOfTheFirstChangeAlsoOverRetries) {
  EXPECT_EQ(queue_.Age(), absl::ZeroDuration());
  queue_.Add(1);
  clock_.Advance(absl::Seconds(3));
  ASSERT_EQ(Take(), 1u);
  EXPECT_EQ(queue_.size(), 1);
  queue_.AddLater(1, absl::Seconds(1));  // it failed
  queue_.Done();
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(queue_.Age(), absl::Seconds(5));
  ASSERT_EQ(Take(), 1u);
  queue_.Done();
  EXPECT_EQ(queue_.Age(), absl::ZeroDuration());
  EXPECT_EQ(queue_.size(), 0);
}

}  // namespace
}  // namespace heavywater
