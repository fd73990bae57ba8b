#include "worker/policy/selection.h"

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

std::vector<Position> Range(Position count) {
  std::vector<Position> positions(count);
  for (Position p = 0; p < count; ++p) positions[p] = p;
  return positions;
}

std::set<Position> Kept(const std::vector<Position>& positions, const std::vector<int64_t>& scores,
                        const SelectionParams& params) {
  std::set<Position> kept;
  for (int32_t index : SelectKept({positions, scores}, params)) kept.insert(positions[index]);
  return kept;
}

// The rule by definition: a position stays if it is protected, or if fewer
// unprotected ones beat it than there is room for.
std::set<Position> BruteForce(const std::vector<Position>& positions,
                              const std::vector<int64_t>& scores, const SelectionParams& params) {
  const auto is_protected = [&](size_t i) {
    return positions[i] < params.sink_tokens ||
           positions[i] >= params.tokens_seen - params.recent_tokens;
  };
  int64_t room = params.budget_tokens;
  std::set<Position> kept;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] == kNoPosition || !is_protected(i)) continue;
    kept.insert(positions[i]);
    --room;
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] == kNoPosition || is_protected(i)) continue;
    int64_t better = 0;
    for (size_t j = 0; j < positions.size(); ++j) {
      if (positions[j] == kNoPosition || is_protected(j)) continue;
      better += scores[j] > scores[i] || (scores[j] == scores[i] && positions[j] < positions[i]);
    }
    if (better < room) kept.insert(positions[i]);
  }
  return kept;
}

TEST(SelectKeptTest, EqualsTheRuleByBruteForceOnRandomSets) {
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    const int seen = 1 + static_cast<int>(random() % 60);
    std::vector<Position> positions = Range(seen);
    std::shuffle(positions.begin(), positions.end(), random);
    positions.resize(1 + random() % seen);
    for (Position& position : positions) {
      if (random() % 8 == 0) position = kNoPosition;
    }
    std::vector<int64_t> scores(positions.size());
    for (int64_t& score : scores) score = static_cast<int64_t>(random() % 5);  // many ties
    const SelectionParams params{.budget_tokens = static_cast<int64_t>(random() % 30),
                                 .sink_tokens = static_cast<int64_t>(random() % 4),
                                 .recent_tokens = static_cast<int64_t>(1 + random() % 6),
                                 .tokens_seen = seen};
    EXPECT_EQ(Kept(positions, scores, params), BruteForce(positions, scores, params)) << round;
  }
}

TEST(SelectKeptTest, DoesNotDependOnTheOrderOfSlots) {
  std::mt19937 random(9);
  std::vector<Position> positions = Range(40);
  const SelectionParams params{
      .budget_tokens = 12, .sink_tokens = 2, .recent_tokens = 4, .tokens_seen = 40};
  const auto score_of = [](Position p) { return int64_t{p % 3}; };
  std::set<Position> first;
  for (int round = 0; round < 20; ++round) {
    std::shuffle(positions.begin(), positions.end(), random);
    std::vector<int64_t> scores;
    for (Position p : positions) scores.push_back(score_of(p));
    const std::set<Position> kept = Kept(positions, scores, params);
    if (round == 0) first = kept;
    EXPECT_EQ(kept, first);
  }
}

TEST(SelectKeptTest, DropsTheOldestPositionsAfterTheSinksLastWhenScoresAreEqual) {
  const SelectionParams params{
      .budget_tokens = 5, .sink_tokens = 1, .recent_tokens = 2, .tokens_seen = 10};
  EXPECT_THAT(Kept(Range(10), std::vector<int64_t>(10, 3), params), ElementsAre(0, 1, 2, 8, 9));
}

// CASES A2: protection is by exclusion, not by a large score.
TEST(SelectKeptTest, CaseA2ProtectedPositionsStayWhateverOthersScore) {
  const SelectionParams params{
      .budget_tokens = 8, .sink_tokens = 2, .recent_tokens = 4, .tokens_seen = 16};
  for (int64_t score : {int64_t{0}, int64_t{1}, std::numeric_limits<int64_t>::max()}) {
    const std::set<Position> kept = Kept(Range(16), std::vector<int64_t>(16, score), params);
    EXPECT_THAT(kept, IsSupersetOf({0, 1, 12, 13, 14, 15}));
    EXPECT_EQ(kept.size(), 8u);
  }
  std::vector<int64_t> outsider(16, 0);
  outsider[7] = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(Kept(Range(16), outsider, params), ElementsAre(0, 1, 2, 7, 12, 13, 14, 15));
}

TEST(SelectKeptTest, KeepsAllWhenTheBudgetIsNotReached) {
  const SelectionParams params{.budget_tokens = 10, .recent_tokens = 1, .tokens_seen = 10};
  EXPECT_EQ(Kept(Range(10), std::vector<int64_t>(10, 0), params).size(), 10u);
}

TEST(SelectKeptTest, NeverKeepsFreeSlots) {
  const std::vector<Position> positions = {kNoPosition, 3, kNoPosition, 1};
  const SelectionParams params{.budget_tokens = 4, .recent_tokens = 1, .tokens_seen = 4};
  EXPECT_THAT(SelectKept({positions, std::vector<int64_t>(4, 9)}, params), ElementsAre(1, 3));
}

}  // namespace
}  // namespace heavywater
