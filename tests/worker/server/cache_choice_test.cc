#include "worker/server/cache_choice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kPatience = absl::Seconds(10);

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

TEST(CacheChoiceTest, AServiceIsLeftWhenItHasBeenSilentForLongEnoughAndNotBefore) {
  CacheChoice choice(3, kPatience);
  EXPECT_FALSE(choice.HomeIsLost(At(0)));
  choice.NoteHome(false, At(0));
  choice.NoteHome(false, At(9));
  EXPECT_FALSE(choice.HomeIsLost(At(9)));
  EXPECT_TRUE(choice.HomeIsLost(At(10)));
  EXPECT_TRUE(choice.LooksElsewhere(At(10)));
  choice.NoteHome(true, At(11));
  EXPECT_FALSE(choice.HomeIsLost(At(30)));
}

TEST(CacheChoiceTest, TheFirstOfTheOthersThatAnswersIsHomeWhereHomeIsLost) {
  CacheChoice choice(3, kPatience);
  EXPECT_THAT(choice.Others(At(0)), ElementsAre(1, 2));
  choice.NoteHome(false, At(0));
  choice.NoteLooked(-1, 2, At(10));
  EXPECT_EQ(choice.home(), 0);
  EXPECT_TRUE(choice.LooksElsewhere(At(11))) << "nobody answers: all are asked again and again";
  EXPECT_THAT(choice.Others(At(11)), ElementsAre(1, 2)) << "in the order of all ranks";
  choice.NoteLooked(2, 2, At(12));
  EXPECT_EQ(choice.home(), 2);
  EXPECT_THAT(choice.Others(At(12)), ElementsAre(0, 1));
  EXPECT_FALSE(choice.LooksElsewhere(At(21)));
  EXPECT_TRUE(choice.LooksElsewhere(At(22))) << "the other ranks may be somewhere else";
}

TEST(CacheChoiceTest, AServiceThatAnswersStaysHomeHoweverLongRanksAreMissing) {
  CacheChoice choice(2, kPatience);
  choice.BeginWaiting(At(0));
  choice.NoteHome(true, At(9));
  EXPECT_FALSE(choice.LooksElsewhere(At(9)));
  EXPECT_TRUE(choice.LooksElsewhere(At(10)));
  choice.NoteLooked(1, 1, At(12));
  EXPECT_EQ(choice.home(), 0);
  EXPECT_FALSE(choice.LooksElsewhere(At(21)));
  EXPECT_TRUE(choice.LooksElsewhere(At(22)));
  choice.Settle(1, At(23));
  EXPECT_EQ(choice.home(), 1);
  EXPECT_FALSE(choice.LooksElsewhere(At(1000))) << "it has formed";
}

TEST(CacheChoiceTest, ALookThatEndedEarlyGoesOnWhereItEnded) {
  CacheChoice choice(5, kPatience);
  choice.BeginWaiting(At(0));
  EXPECT_THAT(choice.Others(At(10)), ElementsAre(1, 2, 3, 4));
  choice.NoteLooked(-1, 2, At(10));
  EXPECT_THAT(choice.Others(At(20)), ElementsAre(3, 4, 1, 2));
  choice.NoteLooked(-1, 4, At(20));
  EXPECT_THAT(choice.Others(At(30)), ElementsAre(1, 2, 3, 4));
}

TEST(CacheChoiceTest, AProcessThatHasJustBegunLooksEarlierTheFirstTime) {
  CacheChoice choice(2, kPatience);
  EXPECT_EQ(choice.UntilLook(At(0)), absl::InfiniteDuration());
  choice.BeginWaiting(At(0), absl::Seconds(3));
  EXPECT_EQ(choice.UntilLook(At(1)), absl::Seconds(2));
  EXPECT_TRUE(choice.LooksElsewhere(At(3)));
  choice.NoteLooked(1, 1, At(4));
  EXPECT_EQ(choice.UntilLook(At(4)), kPatience);
  choice.NoteHome(false, At(5));
  EXPECT_EQ(choice.UntilLook(At(6)), absl::Seconds(8)) << "the ranks may come to where it will be";
}

TEST(CacheChoiceTest, TheOnlyServiceIsNeverLost) {
  CacheChoice choice(1, kPatience);
  choice.BeginWaiting(At(0));
  choice.NoteHome(false, At(0));
  EXPECT_FALSE(choice.HomeIsLost(At(1000)));
  EXPECT_FALSE(choice.LooksElsewhere(At(1000)));
  EXPECT_EQ(choice.UntilLook(At(1000)), absl::InfiniteDuration());
  EXPECT_THAT(choice.Others(At(1000)), IsEmpty());
}

}  // namespace
}  // namespace heavywater
