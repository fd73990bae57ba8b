#include "worker/rank/pivotal_history.h"

#include <vector>

#include "gtest/gtest.h"
#include "worker/backend/pivotal.h"

namespace heavywater {
namespace {

// One set whose slots hold these positions; returns the scores in pivotal queries.
std::vector<double> Plan(PivotalHistory& history, int64_t queries,
                         const std::vector<Position>& positions, std::vector<int64_t> counts,
                         std::vector<int64_t> scores = {}) {
  scores.resize(positions.size());
  for (int64_t& count : counts) count *= kPivotalGain;
  for (int64_t& score : scores) score *= kPivotalGain;
  history.BeginPlan(queries);
  history.AddSet(0, 0, positions, counts, scores);
  std::vector<double> result;
  for (const int64_t score : scores) {
    result.push_back(static_cast<double>(score) / kPivotalGain);
  }
  return result;
}

TEST(PivotalHistoryTest, CountsTheNewestPlansThatHaveTheWindowsQueries) {
  PivotalHistory history(1, 1, /*window=*/8);
  EXPECT_EQ(Plan(history, 4, {5}, {3}), (std::vector<double>{3}));
  EXPECT_EQ(Plan(history, 4, {5}, {2}), (std::vector<double>{5}));
  EXPECT_EQ(Plan(history, 3, {5}, {1}), (std::vector<double>{6}));  // 4 + 4 + 3: 7 are too few
  EXPECT_EQ(Plan(history, 1, {5}, {0}), (std::vector<double>{3}));  // 4 + 3 + 1
  EXPECT_EQ(Plan(history, 9, {5}, {7}), (std::vector<double>{7}));
}

TEST(PivotalHistoryTest, ThePromptsCountFadesOverTheWindow) {
  PivotalHistory history(1, 1, /*window=*/8);
  EXPECT_EQ(Plan(history, 2, {1, 2}, {0, 1}, {40, 0}), (std::vector<double>{30, 1}));
  EXPECT_EQ(Plan(history, 2, {1, 2}, {0, 0}, {30, 1}), (std::vector<double>{20, 1}));
  EXPECT_EQ(Plan(history, 5, {1, 2}, {1, 0}, {20, 1}), (std::vector<double>{1, 1}));
}

TEST(PivotalHistoryTest, APositionIsKnownWhicheverSlotItHasAndForgottenOnceItIsGone) {
  PivotalHistory history(1, 1, /*window=*/100);
  Plan(history, 1, {7, 8, 9}, {1, 2, 3});
  EXPECT_EQ(Plan(history, 1, {9, kNoPosition, 8}, {0, 0, 0}), (std::vector<double>{3, 0, 2}));
  EXPECT_EQ(Plan(history, 1, {7}, {0}), (std::vector<double>{0}));
}

}  // namespace
}  // namespace heavywater
