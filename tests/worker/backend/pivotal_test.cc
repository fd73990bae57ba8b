// GainKind::kPivotal: gains that count the queries for which a position was pivotal.
#include "worker/backend/pivotal.h"

#include <algorithm>
#include <cmath>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

KvShape RandomShape(std::mt19937& rng, int group_size) {
  constexpr int kHeadDims[] = {8, 24, 64, 80, 128};
  KvShape shape;
  shape.num_kv_heads = 1 + static_cast<int>(rng() % 3);
  shape.num_query_heads = shape.num_kv_heads * group_size;
  shape.head_dim = kHeadDims[rng() % std::size(kHeadDims)];
  shape.dtype = kKvDtypes[rng() % 3];
  return shape;
}

// Counts are whole; a probability next to the threshold may be counted by one of them
// alone, which is rare.
void ExpectSameCounts(const std::vector<int64_t>& got, const std::vector<int64_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  int64_t differences = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i] % kPivotalGain, 0) << i;
    const int64_t difference = std::abs(got[i] - want[i]) / kPivotalGain;
    ASSERT_LE(difference, 1) << i;
    differences += difference;
  }
  EXPECT_LE(differences, 1 + static_cast<int64_t>(want.size()) / 500);
}

TEST_P(BackendTest, PivotalCountsEqualTheOraclesOverRandomShapes) {
  for (unsigned seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 9));
    AttendCase attend = RandomAttendCase(rng, shape, 1 + static_cast<int>(rng() % 3));
    attend.gains = GainKind::kPivotal;
    for (AttendCase::Item& item : attend.items) {
      std::fill(item.layer.gains.begin(), item.layer.gains.end(), 0);
    }
    const AttendOutcome got = RunAttend(backend(), attend);
    const AttendOutcome want = RunAttend(oracle(), attend);
    for (size_t item = 0; item < attend.items.size(); ++item) {
      ExpectSameCounts(got.gains[item], want.gains[item]);
    }
    attend.gains = GainKind::kProbability;
    ExpectSameBits(got.out, RunAttend(backend(), attend).out);  // what is counted changes no output
  }
}

TEST_P(BackendTest, PivotalCountsOfAPromptEqualTheOraclesAndThoseOfItsChunks) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 8));
    const int64_t length = 1 + static_cast<int64_t>(rng() % 200);
    PromptCase prompt = RandomPromptCase(rng, shape, length);
    prompt.gains = GainKind::kPivotal;
    prompt.score_from = static_cast<Position>(rng() % 2 == 0 ? 0 : rng() % length);
    prompt.chunks = {length};
    const AttendOutcome whole = RunPrompt(backend(), prompt);
    ExpectSameCounts(whole.gains[0], RunPrompt(oracle(), prompt).gains[0]);
    if (length < 3) continue;
    prompt.chunks = {length / 3, length - length / 3};
    ExpectSameCounts(RunPrompt(backend(), prompt).gains[0], whole.gains[0]);
  }
}

// One query of a head size of 8 whose logits for positions 0 .. 3 are 0, 0, 0 and `logit`.
std::vector<int64_t> CountsOf(Backend& backend, float logit) {
  KvShape shape;
  shape.num_query_heads = shape.num_kv_heads = 1;
  shape.head_dim = 8;
  std::mt19937 rng(1);
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 1};
  attend.items.push_back({.layer = DenseLayer(rng, shape, 1, 4)});
  std::vector<float> keys(4 * 8, 0.0f);
  keys[3 * 8] = logit;
  attend.items[0].layer.keys = Stored(keys, shape.dtype);
  attend.items[0].first_position = 3;
  attend.queries = {1, 0, 0, 0, 0, 0, 0, 0};
  attend.gains = GainKind::kPivotal;
  std::vector<int64_t> counts = RunAttend(backend, attend).gains[0];
  for (int64_t& count : counts) count /= kPivotalGain;
  return counts;
}

TEST_P(BackendTest, APositionIsPivotalAboveTheMeanOfItsQuerysPositions) {
  // Probabilities of 1/4 each: none is above the mean, however they are rounded.
  EXPECT_EQ(CountsOf(backend(), 0), (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(CountsOf(backend(), 0.01f), (std::vector<int64_t>{0, 0, 0, 1}));
  EXPECT_EQ(CountsOf(backend(), -0.01f), (std::vector<int64_t>{1, 1, 1, 0}));
}

}  // namespace
}  // namespace heavywater
