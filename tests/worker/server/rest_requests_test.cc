#include "worker/server/rest_requests.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr PageId kFirst = {0, 1, 2};
constexpr PageId kSecond = {1, 0, 3};
std::byte memory[2];

TEST(RestRequestsTest, WhatWasNotToldIsThereAgainAtOnceWhenItIsAskedFor) {
  RestRequests requests;
  requests.Rest(kFirst, memory);
  requests.Rest(kSecond, memory + 1);
  EXPECT_EQ(requests.Ask(kFirst), memory);
  EXPECT_EQ(requests.num_resting(), 1);
  EXPECT_EQ(requests.Ask(kFirst), nullptr) << "it does not rest";
  EXPECT_THAT(requests.NextToTell(10), ElementsAre(kSecond));
  EXPECT_THAT(requests.NextToTell(10), IsEmpty());
  EXPECT_THAT(requests.NextToAsk(10), IsEmpty());
  EXPECT_FALSE(requests.has_work());
}

TEST(RestRequestsTest, WhatMayHaveBeenToldIsAskedForAfterwards) {
  RestRequests requests;
  const absl::Time now = absl::Now();
  requests.Rest(kFirst, memory);
  requests.Rest(kSecond, memory + 1);
  const std::vector<PageId> told = requests.NextToTell(10);
  EXPECT_EQ(requests.Ask(kFirst), nullptr) << "the call is on its way";
  requests.TellEnded(told, /*known=*/false, now);
  EXPECT_THAT(requests.NextToTell(10), ElementsAre(kSecond)) << "once more, but not what is asked";
  EXPECT_EQ(requests.Ask(kSecond), nullptr);
  EXPECT_THAT(requests.NextToAsk(1), ElementsAre(kFirst));
  EXPECT_THAT(requests.NextToAsk(10), ElementsAre(kSecond));
  requests.AskEnded(kFirst, RestRequests::Answer::kThere);
  requests.AskEnded(kSecond, RestRequests::Answer::kLater);
  EXPECT_EQ(requests.num_resting(), 1);
  EXPECT_THAT(requests.NextToAsk(10), ElementsAre(kSecond));
  EXPECT_EQ(requests.Ask(kSecond), nullptr) << "asked for already";
  requests.AskEnded(kSecond, RestRequests::Answer::kGone);
  EXPECT_EQ(requests.num_resting(), 0);
  EXPECT_THAT(requests.TakeGone(), ElementsAre(kSecond));
  EXPECT_THAT(requests.TakeGone(), IsEmpty());
}

TEST(RestRequestsTest, PagesAreUnknownUntilSomeTimeAfterTheyWereTold) {
  RestRequests requests;
  const absl::Time now = absl::Now();
  requests.Rest(kFirst, memory);
  requests.Rest(kSecond, memory + 1);
  EXPECT_EQ(requests.PagesUnknownAt(now + absl::Hours(1)), 2);
  const std::vector<PageId> told = requests.NextToTell(10);
  EXPECT_EQ(requests.PagesUnknownAt(now + absl::Hours(1)), 2);
  requests.TellEnded(told, /*known=*/true, now);
  EXPECT_EQ(requests.PagesUnknownAt(now), 2);
  EXPECT_EQ(requests.PagesUnknownAt(now + absl::Milliseconds(199)), 2);
  EXPECT_EQ(requests.PagesUnknownAt(now + absl::Milliseconds(201)), 0);
}

}  // namespace
}  // namespace heavywater
