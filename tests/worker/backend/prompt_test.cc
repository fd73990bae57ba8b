// Backend::AttendPrompt.
#include <cmath>
#include <numeric>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;

KvShape Shape(int num_query_heads, int num_kv_heads, int head_dim, KvDtype dtype) {
  KvShape shape;
  shape.num_query_heads = num_query_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  return shape;
}

TEST_P(BackendTest, AttendPromptEqualsTheOracleOverRandomShapes) {
  constexpr int kHeadDims[] = {8, 24, 64, 72, 80, 96, 128, 256};
  constexpr int64_t kLengths[] = {1, 2, 7, 8, 23, 24, 25, 31, 32, 33, 64, 100, 255, 256, 257, 290};
  for (unsigned seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const int kv_heads = 1 + static_cast<int>(rng() % 2);
    const int group_size = 1 + static_cast<int>(seed % 9);
    const KvShape shape = Shape(kv_heads * group_size, kv_heads,
                                kHeadDims[rng() % std::size(kHeadDims)], kKvDtypes[rng() % 3]);
    const int64_t length = kLengths[rng() % std::size(kLengths)];
    PromptCase prompt = RandomPromptCase(rng, shape, length);
    prompt.score_from = static_cast<Position>(rng() % 2 == 0 ? 0 : rng() % (length + 1));
    ExpectClose(RunPrompt(backend(), prompt), RunPrompt(oracle(), prompt), length * group_size);
    if (HasFatalFailure()) return;
  }
}

TEST_P(BackendTest, APromptInChunksEqualsTheWholePrompt) {
  std::mt19937 rng(7);
  const KvShape shape = Shape(6, 2, 64, KvDtype::kBFloat16);
  PromptCase prompt = RandomPromptCase(rng, shape, 384);
  prompt.score_from = 100;
  const AttendOutcome whole = RunPrompt(backend(), prompt);
  for (const std::vector<int64_t>& chunks : std::vector<std::vector<int64_t>>{
           {128, 128, 128}, {1, 383}, {300, 44, 40}, {383, 1}, {25, 31, 32, 33, 263}}) {
    prompt.chunks = chunks;
    const AttendOutcome chunked = RunPrompt(backend(), prompt);
    for (size_t i = 0; i < whole.out.size(); ++i) {
      ASSERT_NEAR(chunked.out[i], whole.out[i], 1e-5) << "output " << i;
    }
    for (size_t i = 0; i < whole.gains[0].size(); ++i) {
      ASSERT_NEAR(chunked.gains[0][i], whole.gains[0][i], 4 * 384) << "gain " << i;
    }
  }
}

TEST_P(BackendTest, PromptGainsAreColumnSumsOfTheScoredQueriesOnly) {
  std::mt19937 rng(9);
  const KvShape shape = Shape(6, 2, 64, KvDtype::kFloat32);
  for (const Position score_from : {0, 168, 200}) {
    PromptCase prompt = RandomPromptCase(rng, shape, 200);
    prompt.score_from = score_from;
    const std::vector<int64_t> gains = RunPrompt(backend(), prompt).gains[0];
    const int64_t queries = (200 - score_from) * 3;
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      const auto first = gains.begin() + kv_head * prompt.layer.capacity;
      EXPECT_NEAR(std::accumulate(first, first + 200, int64_t{0}), queries * kOne, queries * 101);
    }
  }
}

TEST_P(BackendTest, APromptIsCausal) {
  std::mt19937 rng(13);
  const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32);
  PromptCase prompt = RandomPromptCase(rng, shape, 90);
  prompt.score_from = 90;
  const AttendOutcome before = RunPrompt(backend(), prompt);
  // Another last token changes nothing for the queries before it.
  const std::vector<std::byte> other = Stored(RandomFloats(rng, 64, 5), shape.dtype);
  std::copy(other.begin(), other.end(), prompt.layer.keys.begin() + 89 * 64 * 4);
  std::copy(other.begin(), other.end(), prompt.layer.values.begin() + 89 * 64 * 4);
  const AttendOutcome after = RunPrompt(backend(), prompt);
  const auto end = 89 * 2 * 64;
  ExpectSameBits({after.out.begin(), after.out.begin() + end},
                 {before.out.begin(), before.out.begin() + end});
  EXPECT_NE(after.out[end], before.out[end]);
}

TEST_P(BackendTest, APromptEqualsDecodingItsTokensOneByOne) {
  std::mt19937 rng(17);
  const KvShape shape = Shape(4, 2, 64, KvDtype::kBFloat16);
  const PromptCase prompt = RandomPromptCase(rng, shape, 70);
  AttendCase decode{.shape = shape, .items = {}, .queries = prompt.queries, .scale = prompt.scale};
  decode.items.push_back({.layer = prompt.layer, .num_tokens = 70, .first_position = 0});
  ExpectClose(RunPrompt(backend(), prompt), RunAttend(backend(), decode), 70 * 2);
}

}  // namespace
}  // namespace heavywater
