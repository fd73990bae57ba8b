#include "worker/policy/head_budgets.h"

#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;

// Two heads of ten positions; of each the first and the last two are protected.
HeadScores TwoHeads(const std::vector<int64_t>& scores) {
  return {.scores = scores, .num_heads = 2, .num_tokens = 10, .first = 1, .end = 8};
}

TEST(DivideSlotsTest, FollowsWhereTheHighestScoresLie) {
  const std::vector<int64_t> scores = {99, 9, 9, 9, 9, 9, 1, 1, 99, 99,  //
                                       99, 9, 1, 1, 1, 1, 1, 1, 99, 99};
  EXPECT_THAT(DivideSlots(TwoHeads(scores), 3, 0.0), ElementsAre(5, 1));
  // A third of an even share for each; the rest, 4, as 5 to 1: 3 and 0, and one to the first.
  EXPECT_THAT(DivideSlots(TwoHeads(scores), 3, 1.0 / 3), ElementsAre(5, 1));
  EXPECT_THAT(DivideSlots(TwoHeads(scores), 3, 0.67), ElementsAre(4, 2));
  EXPECT_THAT(DivideSlots(TwoHeads(scores), 3, 1.0), ElementsAre(3, 3));
}

TEST(DivideSlotsTest, GivesEqualScoresToTheLowerHeadButNoHeadMoreThanItHas) {
  const std::vector<int64_t> alike(20, 7);
  EXPECT_THAT(DivideSlots(TwoHeads(alike), 2, 0.0), ElementsAre(4, 0));
  EXPECT_THAT(DivideSlots(TwoHeads(alike), 5, 0.0), ElementsAre(7, 3));
  EXPECT_THAT(DivideSlots(TwoHeads(alike), 7, 0.2), ElementsAre(7, 7));
  EXPECT_THAT(DivideSlots(TwoHeads(alike), 0, 0.2), ElementsAre(0, 0));
}

TEST(DivideSlotsTest, KeepsTheTotalAndTheFloorAndStaysBelowTheMostInRandomCases) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    HeadScores heads = {.scores = {},
                        .num_heads = 1 + static_cast<int>(random() % 8),
                        .num_tokens = 1 + static_cast<int64_t>(random() % 40)};
    heads.first = static_cast<int64_t>(random() % heads.num_tokens);
    heads.end = heads.num_tokens;
    const int64_t candidates = heads.end - heads.first;
    std::vector<int64_t> scores(heads.num_heads * heads.num_tokens);
    for (int64_t& score : scores) score = static_cast<int64_t>(random() % 5);
    heads.scores = scores;
    const auto even = static_cast<int64_t>(random() % (candidates + 1));
    const double floor = static_cast<double>(random() % 11) / 10;
    const std::vector<int64_t> slots = DivideSlots(heads, even, floor);
    EXPECT_EQ(std::accumulate(slots.begin(), slots.end(), int64_t{0}), heads.num_heads * even);
    // Of the first heads, as one rank may hold them; ranks hold any others, too.
    for (int own = 1; own <= heads.num_heads; ++own) {
      const std::vector<int64_t> most = MostSlots(heads.num_heads, own, even, candidates, floor);
      const int64_t most_together = std::accumulate(most.begin(), most.end(), int64_t{0});
      for (int first = 0; first + own <= heads.num_heads; ++first) {
        const auto begin = slots.begin() + first;
        EXPECT_LE(std::accumulate(begin, begin + own, int64_t{0}), most_together);
        for (int head = first; head < first + own; ++head) {
          EXPECT_LE(slots[head], most[0]);
          EXPECT_LE(slots[head], candidates);
          EXPECT_GE(static_cast<double>(slots[head]), floor * static_cast<double>(even) - 1);
        }
      }
    }
  }
}

TEST(MostSlotsTest, NeverFallsAsThePromptGrows) {
  int64_t before = 0;
  for (int64_t candidates = 30; candidates < 400; ++candidates) {
    const std::vector<int64_t> most = MostSlots(8, 3, 30, candidates, 0.2);
    const int64_t now = std::accumulate(most.begin(), most.end(), int64_t{0});
    EXPECT_GE(now, before);
    before = now;
  }
  EXPECT_EQ(before, 8 * 30 - 5 * 6);
  EXPECT_THAT(MostSlots(3, 1, 100, 1000, 0.2), ElementsAre(260));
  EXPECT_THAT(MostSlots(3, 3, 100, 1000, 0.2), ElementsAre(260, 20, 20));
  EXPECT_THAT(MostSlots(3, 3, 100, 120, 0.2), ElementsAre(120, 120, 60));
}

TEST(BudgetOfHeadTest, RecentIsTheSameShareOfEveryHeadsBudget) {
  const LayerBudget even = {.budget_tokens = 100, .recent_tokens = 40, .prompt_budget_tokens = 100};
  EXPECT_EQ(BudgetOfHead(even, 4, 50), (LayerBudget{50, 20, 50}));
  EXPECT_EQ(BudgetOfHead(even, 4, 5), (LayerBudget{5, 1, 5}));
  const LayerBudget unbounded = {.budget_tokens = 0, .prompt_budget_tokens = 100};
  EXPECT_EQ(BudgetOfHead(unbounded, 4, 50), (LayerBudget{0, 0, 50}));
}

}  // namespace
}  // namespace heavywater
