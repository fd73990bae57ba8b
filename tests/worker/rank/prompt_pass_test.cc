#include "worker/rank/prompt_pass.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

TestGroupOptions Options(int world_size) {
  TestGroupOptions options;
  options.world_size = world_size;
  options.max_step_tokens = 16;
  return options;
}

TEST(PromptPassTest, RunsChunkByChunkAndLayerByLayer) {
  TestGroup group(Options(1));
  ASSERT_TRUE(group.Open(1, TestSequence(Policy::kH2o, Scope::kLayer, 8, 8, 40)).ok());
  auto pass = *PromptPass::Create(group.cache(), group.model(), 1, TestTokens(0, 40));
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(pass->layer(), layer);
    for (int chunk = 0; chunk < 3; ++chunk) {
      EXPECT_FALSE(pass->layer_complete());
      ASSERT_TRUE(pass->RunChunk().ok());
    }
    ASSERT_TRUE(pass->layer_complete());
    EXPECT_FALSE(pass->done());
    ASSERT_TRUE(pass->LayerAfter().ok());
  }
  ASSERT_TRUE(pass->done());
  const DeviceSpan<const float> logits = *pass->ComputeLogits();
  EXPECT_EQ(logits.device_address()[5], 10 * TestTokens(0, 40).back() + 5);
}

void ExpectPromptsSideBySideEqualEachAlone(const TestGroupOptions& options, Positions positions) {
  const std::vector<int64_t> lengths = {33, 5, 20};
  const auto sequence = [&](int i) {
    SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 6, 6, lengths[i]);
    sequence.policy.positions = positions;
    return sequence;
  };
  TestGroup together(options);
  TestGroup alone(options);
  std::vector<std::unique_ptr<PromptPass>> owned;
  std::vector<PromptPass*> passes;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(together.Open(i + 1, sequence(i)).ok());
    owned.push_back(
        *PromptPass::Create(together.cache(), together.model(), i + 1, TestTokens(i, lengths[i])));
    passes.push_back(owned.back().get());
    ASSERT_TRUE(alone.OpenAndRunPrompt(i + 1, sequence(i), TestTokens(i, lengths[i])).ok());
  }
  for (int layer = 0; layer < options.num_layers; ++layer) {
    ASSERT_TRUE(PromptPass::RunLayerTogether(passes).ok());
    for (PromptPass* pass : passes) {
      EXPECT_TRUE(pass->layer_complete());
      ASSERT_TRUE(pass->LayerAfter().ok());
    }
  }
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(passes[i]->done());
    const DeviceSpan<const float> logits = *passes[i]->ComputeLogits();
    EXPECT_EQ(logits.device_address()[5], 10 * TestTokens(i, lengths[i]).back() + 5);
    const int32_t last = TestTokens(i, 1, lengths[i] - 1)[0];
    for (int layer = 0; layer < options.num_layers; ++layer) {
      EXPECT_EQ(together.Sets(i + 1, layer), alone.Sets(i + 1, layer)) << "sequence " << i + 1;
      EXPECT_EQ(together.Attention(layer, last, static_cast<Position>(lengths[i] - 1)),
                alone.Attention(layer, last, static_cast<Position>(lengths[i] - 1)));
    }
  }
}

TEST(PromptPassTest, PromptsSideBySideEqualEachAlone) {
  TestGroupOptions options = Options(1);
  options.max_step_tokens = 64;
  ExpectPromptsSideBySideEqualEachAlone(options, Positions::kAbsolute);
  options.rope_frequencies = TestRopeFrequencies(options.head_dim);
  ExpectPromptsSideBySideEqualEachAlone(options, Positions::kCacheRelative);
}

TEST(PromptPassTest, HoldsOneLayersWholeKvAndTheBudgetsOfTheOthers) {
  TestGroupOptions options = Options(1);
  options.num_layers = 4;
  TestGroup group(options);
  const SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 8, 8, 200);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 200)).ok());
  const KvShape shape = TestShape(options, 0);
  const int64_t whole = DeviceLayerBytes(shape, 1, 200).total();
  const int64_t kept = 4 * DeviceLayerBytes(shape, 1, 17).total();
  const DeviceMemory& memory = group.cache().memory();
  EXPECT_EQ(memory.kv_gauge().peak_bytes, whole + kept);
  EXPECT_EQ(memory.kv_gauge().current_bytes, kept);
  EXPECT_EQ(memory.gauge(MemoryKind::kPromptKv).current_bytes, 0);
  EXPECT_EQ(memory.gauge(MemoryKind::kPromptHidden).peak_bytes, 200 * 4 * 4);
  EXPECT_EQ(memory.gauge(MemoryKind::kPromptHidden).current_bytes, 0);
  const SequenceStats stats = *group.cache().Stats(1);
  EXPECT_EQ(stats.peak_device_bytes, whole + kept);
  EXPECT_EQ(stats.peak_device_bytes_after_prompt, kept);
}

TEST(PromptPassTest, SeedsAreTheRawWindowSumsAndNotThePooledVotes) {
  TestGroup group(Options(1));
  SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 12, 8, 50);
  sequence.policy.window = 8;
  PlainSequence plain(group, sequence.policy);
  plain.Prompt(TestTokens(0, 50));
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 50)).ok());
  EXPECT_EQ(plain.Compare(group, 1, 100), "");
  // The scores of all kept columns sum to less than the window's mass, 8 queries
  // of 4 heads; pooled ones would come to five times as much.
  int64_t sum = 0;
  const Ledger set = group.Sets(1, 0)[0];
  for (const auto& [position, score] : set) sum += score;
  EXPECT_LT(sum, int64_t{8 * 4} << 32);
}

TEST(PromptPassTest, ARankWhoseVotesAreMissingIsNoticedByEveryRank) {
  for (Policy policy : {Policy::kH2o, Policy::kSnapKv, Policy::kSnapKvH2o}) {
    TestGroup group(Options(2));
    ASSERT_TRUE(group.Open(1, TestSequence(policy, Scope::kLayer, 8, 8, 40)).ok());
    group.tamper = [](std::vector<DeviceSpan<int64_t>>& buffers) {
      std::fill_n(buffers[0].device_address() + 6, buffers[0].size() - 6, 0);
    };
    const absl::Status status = group.RunPrompt(1, TestTokens(0, 40));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("attention received in layer 0"));
    group.tamper = nullptr;
    // The sequence is of no use, and says so; closing it frees everything.
    EXPECT_EQ(group.Append({{1, {1}}}).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(group.Close(1).ok());
    EXPECT_EQ(group.cache().memory().kv_gauge().current_bytes, 0);
  }
}

TEST(PromptPassTest, RanksThatKeptDifferentPositionsAreNoticedAtTheNextLayer) {
  TestGroup group(Options(2));
  ASSERT_TRUE(group.Open(1, TestSequence(Policy::kStreaming, Scope::kLayer, 8, 8, 40)).ok());
  int reduces = 0;
  group.tamper = [&reduces](std::vector<DeviceSpan<int64_t>>& buffers) {
    if (++reduces == 2) buffers[1].device_address()[5] = 42;
  };
  const absl::Status status = group.RunPrompt(1, TestTokens(0, 40));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("hash of the layers so far is "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("and 42 on rank 1"));
}

TEST(PromptPassTest, AnotherRanksFailureEndsThePromptHere) {
  TestGroup group(Options(2));
  ASSERT_TRUE(group.Open(1, TestSequence(Policy::kH2o, Scope::kLayer, 8, 8, 40)).ok());
  group.tamper = [](std::vector<DeviceSpan<int64_t>>& buffers) {
    buffers[1].device_address()[1] = static_cast<int64_t>(absl::StatusCode::kDataLoss);
  };
  const absl::Status status = group.RunPrompt(1, TestTokens(0, 40));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 reports DATA_LOSS"));
}

TEST(PromptPassTest, NotANumberInOneRanksQueriesEndsThePromptOnEveryRank) {
  for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
    TestGroupOptions options = Options(2);
    options.rows = [shape = TestShape(options, 0)](int layer, int32_t token, Position position) {
      SyntheticRow row = MakeSyntheticRow(shape, 1, layer, token, position);
      if (position == 39) row.q.back() = std::nanf("");  // the last head: rank 1's
      return row;
    };
    TestGroup group(options);
    SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, scope, 8, 8, 40);
    sequence.policy.window = 1;
    ASSERT_TRUE(group.Open(1, sequence).ok());
    // RunPrompt() checks that all ranks return the same code.
    EXPECT_EQ(group.RunPrompt(1, TestTokens(0, 40)).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(PromptPassTest, WrongSequencesAndLengthsAreRefused) {
  TestGroup group(Options(1));
  EXPECT_EQ(group.RunPrompt(7, TestTokens(0, 4)).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(group.Open(1, TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 10)).ok());
  const absl::Status status = group.RunPrompt(1, TestTokens(0, 9));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has 9 tokens, want 10"));
  ASSERT_TRUE(group.RunPrompt(1, TestTokens(0, 10)).ok());
  EXPECT_EQ(group.RunPrompt(1, TestTokens(0, 10)).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace heavywater
