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
  EXPECT_THAT(choice.Others(), ElementsAre(1, 2));
  choice.NoteHome(false, At(0));
  choice.NoteLooked(-1, At(10));
  EXPECT_EQ(choice.home(), 0);
  EXPECT_TRUE(choice.LooksElsewhere(At(11))) << "nobody answers: all are asked again and again";
  choice.NoteLooked(2, At(12));
  EXPECT_EQ(choice.home(), 2);
  EXPECT_THAT(choice.Others(), ElementsAre(0, 1));
  EXPECT_FALSE(choice.LooksElsewhere(At(21)));
  EXPECT_TRUE(choice.LooksElsewhere(At(22))) << "the other ranks may be somewhere else";
}

TEST(CacheChoiceTest, AServiceThatAnswersStaysHomeHoweverLongRanksAreMissing) {
  CacheChoice choice(2, kPatience);
  choice.BeginWaiting(At(0));
  choice.NoteHome(true, At(9));
  EXPECT_FALSE(choice.LooksElsewhere(At(9)));
  EXPECT_TRUE(choice.LooksElsewhere(At(10)));
  choice.NoteLooked(1, At(12));
  EXPECT_EQ(choice.home(), 0);
  EXPECT_FALSE(choice.LooksElsewhere(At(21)));
  EXPECT_TRUE(choice.LooksElsewhere(At(22)));
  choice.Settle(1, At(23));
  EXPECT_EQ(choice.home(), 1);
  EXPECT_FALSE(choice.LooksElsewhere(At(1000))) << "it has formed";
}

TEST(CacheChoiceTest, TheOnlyServiceIsNeverLost) {
  CacheChoice choice(1, kPatience);
  choice.BeginWaiting(At(0));
  choice.NoteHome(false, At(0));
  EXPECT_FALSE(choice.HomeIsLost(At(1000)));
  EXPECT_FALSE(choice.LooksElsewhere(At(1000)));
  EXPECT_THAT(choice.Others(), IsEmpty());
}

}  // namespace
}  // namespace heavywater
