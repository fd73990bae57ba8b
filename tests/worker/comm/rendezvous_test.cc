#include "worker/comm/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "absl/time/clock.h"

namespace heavywater {
namespace {

TEST(InProcessRendezvousTest, GivesAValueThatIsThereAtOnce) {
  InProcessRendezvous store;
  ASSERT_TRUE(store.Put("key", std::string("\0value", 6)).ok());
  EXPECT_EQ(store.Wait("key", absl::ZeroDuration()).value(), std::string("\0value", 6));
}

TEST(InProcessRendezvousTest, WaitsForAValueThatComesLater) {
  InProcessRendezvous store;
  std::thread putter([&] {
    absl::SleepFor(absl::Milliseconds(50));
    store.Put("other", "no").IgnoreError();
    store.Put("key", "value").IgnoreError();
  });
  EXPECT_EQ(store.Wait("key", absl::Seconds(30)).value(), "value");
  putter.join();
}

TEST(InProcessRendezvousTest, NamesTheKeyThatNobodyPut) {
  InProcessRendezvous store;
  const absl::Status status = store.Wait("group/7/rank", absl::Milliseconds(20)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("group/7/rank"));
}

}  // namespace
}  // namespace heavywater
