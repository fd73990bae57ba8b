// Policy `oracle`: what is particular to it. That attention equals the plain reference
// is kept_sets_test's.
#include <algorithm>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

// Runs a sequence and returns attention of its tokens from position 40 on.
std::vector<std::vector<float>> Attentions(const SequenceOptions& sequence, int per_append,
                                           int world_size = 1) {
  TestGroupOptions options;
  options.world_size = world_size;
  TestGroup group(options);
  EXPECT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 40)).ok());
  for (int position = 40; position < 60; position += per_append) {
    EXPECT_TRUE(group.Append({{1, TestTokens(0, per_append, position)}}).ok());
  }
  for (const Ledger& set : group.Sets(1, 0)) EXPECT_THAT(set, SizeIs(60));
  std::vector<std::vector<float>> attentions;
  for (int i = 40; i < 60; ++i) {
    attentions.push_back(group.Attention(1, TestTokens(0, 1, i)[0], i));
  }
  return attentions;
}

double LargestDifference(const std::vector<std::vector<float>>& a,
                         const std::vector<std::vector<float>>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) {
      largest = std::max<double>(largest, std::abs(a[i][j] - b[i][j]));
    }
  }
  return largest;
}

TEST(OracleTest, WithRoomForAllEqualsTheFullCacheAndWithLessComesCloserTheMoreItSees) {
  const auto full = Attentions(TestSequence(Policy::kFull, Scope::kKvHead, 1, 1, 40), 1);
  EXPECT_EQ(Attentions(TestSequence(Policy::kOracle, Scope::kKvHead, 58, 2, 40), 1), full);
  const auto ten = Attentions(TestSequence(Policy::kOracle, Scope::kKvHead, 8, 2, 40), 1);
  const auto forty = Attentions(TestSequence(Policy::kOracle, Scope::kKvHead, 38, 2, 40), 1);
  EXPECT_GT(LargestDifference(forty, full), 0);
  EXPECT_LT(LargestDifference(forty, full), LargestDifference(ten, full));
}

TEST(OracleTest, EveryTokenOfAnAppendChoosesForItselfOnAnyNumberOfRanks) {
  const SequenceOptions sequence = TestSequence(Policy::kOracle, Scope::kKvHead, 8, 2, 40);
  const auto alone = Attentions(sequence, 1);
  EXPECT_EQ(Attentions(sequence, 5), alone);
  EXPECT_EQ(Attentions(sequence, 4, /*world_size=*/2), alone);
}

TEST(OracleTest, IsRefusedWhereItCannotChoose) {
  TestGroup group({});
  absl::Status status = group.Open(1, TestSequence(Policy::kOracle, Scope::kLayer, 4, 4, 10));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("scope is layer, want kv_head"));
  SequenceOptions recall = TestSequence(Policy::kOracle, Scope::kKvHead, 4, 4, 10);
  recall.policy.recall.enabled = true;
  status = ResolveBudget(recall.policy, 10).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("recall is true, want false with policy oracle"));
  TestGroupOptions shared;
  shared.world_size = 2;
  shared.kv_heads = 1;
  TestGroup two(shared);
  status = two.Open(1, TestSequence(Policy::kOracle, Scope::kKvHead, 4, 4, 10));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("policy is oracle, but 2 ranks share"));
}

}  // namespace
}  // namespace heavywater
