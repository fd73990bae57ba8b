// Positions::kCacheRelative: what is particular to it. That kept sets and attention
// equal the plain reference is kept_sets_test's.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// Of scores: keys and queries turn in float, in the reference in double.
constexpr int64_t kTolerance = 100000;

TestGroupOptions ByPlaces() {
  TestGroupOptions options;
  options.rope_frequencies = TestRopeFrequencies(options.head_dim);
  return options;
}

SequenceOptions Relative(Policy policy, Scope scope, int64_t heavy, int64_t recent, int64_t prompt,
                         int64_t more = 256) {
  SequenceOptions options = TestSequence(policy, scope, heavy, recent, prompt, more);
  options.policy.positions = Positions::kCacheRelative;
  return options;
}

std::string OpenError(const TestGroupOptions& group_options, const SequenceOptions& options) {
  TestGroup group(group_options);
  const absl::Status status = group.Open(1, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(PlacesTest, AWindowOfALongTextIsAttendedToAsIfItWereTheText) {
  TestGroup group(ByPlaces());
  const SequenceOptions window = Relative(Policy::kStreaming, Scope::kLayer, 1, 23, 30);
  const std::vector<int32_t> tokens = TestTokens(0, 200);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, window, {tokens.begin(), tokens.begin() + 30}).ok());
  for (int i = 30; i < 200; ++i) ASSERT_TRUE(group.Append({{1, {tokens[i]}}}).ok());
  const std::vector<float> last = group.Attention(0, tokens[199], 199);

  // The 24 that were there and the token itself, in a sequence of their own.
  TestGroup fresh(ByPlaces());
  const SequenceOptions all = Relative(Policy::kFull, Scope::kLayer, 1, 1, 25);
  ASSERT_TRUE(fresh.OpenAndRunPrompt(1, all, {tokens.end() - 25, tokens.end()}).ok());
  const std::vector<float> want = fresh.Attention(0, tokens[199], 24);
  ASSERT_EQ(last.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(last[i], want[i], 1e-5f);
}

TEST(PlacesTest, GenerationGoesOnFarBeyondWhatTheModelWasTrainedFor) {
  for (const Policy policy : {Policy::kStreaming, Policy::kH2o, Policy::kSnapKvH2o}) {
    TestGroupOptions options = ByPlaces();
    options.trained_tokens = 64;
    TestGroup group(options);
    const SequenceOptions sequence = Relative(policy, Scope::kKvHead, 20, 20, 60, 1000);
    PlainSequence plain(group, sequence.policy);
    plain.Prompt(TestTokens(0, 60));
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 60)).ok());
    for (int position = 60; position < 360; ++position) {
      plain.Append(TestTokens(0, 1, position));
      ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, position)}}).ok());
    }
    EXPECT_EQ(plain.Compare(group, 1, kTolerance), "");
    EXPECT_EQ(group.cache().Stats(1)->tokens_seen, 360);
  }
}

TEST(PlacesTest, WhatCannotBeAtItsPlaceIsRefusedByName) {
  EXPECT_THAT(OpenError({}, Relative(Policy::kH2o, Scope::kLayer, 4, 4, 10)),
              HasSubstr("positions is cache_relative, want absolute: this worker has no model"));
  TestGroupOptions trained = ByPlaces();
  trained.trained_tokens = 64;
  EXPECT_THAT(OpenError(trained, Relative(Policy::kH2o, Scope::kLayer, 4, 4, 65)),
              HasSubstr("prompt_tokens is 65, want at most the 64 places"));
  EXPECT_THAT(OpenError(trained, Relative(Policy::kH2o, Scope::kLayer, 60, 4, 10)),
              HasSubstr("heavy + recent + plan_interval_steps is 65, want at most the 64"));
  EXPECT_THAT(OpenError(trained, Relative(Policy::kFull, Scope::kLayer, 1, 1, 10, 55)),
              HasSubstr("unbounded in decode is 65, want at most the 64"));
  SequenceOptions recall = Relative(Policy::kSnapKvH2o, Scope::kLayer, 4, 4, 10);
  recall.policy.recall.enabled = true;
  EXPECT_THAT(std::string(ResolveBudget(recall.policy, 10).status().message()),
              HasSubstr("positions is cache_relative, want absolute with recall"));
  EXPECT_THAT(OpenError(trained, Relative(Policy::kOracle, Scope::kKvHead, 4, 4, 10)),
              HasSubstr("positions is cache_relative, want absolute with policy oracle"));
}

TEST(PlacesTest, AnAppendThatHasNoPlacesLeftIsRefusedAndTheSequenceGoesOn) {
  TestGroupOptions options = ByPlaces();
  options.trained_tokens = 32;
  TestGroup group(options);
  const SequenceOptions sequence = Relative(Policy::kStreaming, Scope::kLayer, 1, 15, 30);
  PlainSequence plain(group, sequence.policy);
  plain.Prompt(TestTokens(0, 30));
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 30)).ok());
  const absl::Status status = group.Append({{1, TestTokens(0, 17, 30)}});
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("17 tokens after 16 resident ones, want at most 32 together"));
  plain.Append(TestTokens(0, 16, 30));
  ASSERT_TRUE(group.Append({{1, TestTokens(0, 16, 30)}}).ok());
  EXPECT_EQ(plain.Compare(group, 1, kTolerance), "");
}

// A5 and A8: two counters; keys lie as they came, one for each KV head.
TEST(PlacesTest, KeysLieUnrotatedAndTokensSeenAreNotTokensResident) {
  TestGroup group(ByPlaces());
  const SequenceOptions sequence = Relative(Policy::kH2o, Scope::kLayer, 10, 10, 1, 299);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 1)).ok());
  for (int i = 1; i < 100; ++i) ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, i)}}).ok());
  EXPECT_EQ(group.cache().Stats(1)->tokens_seen, 100);
  EXPECT_EQ(group.cache().Stats(1)->tokens_resident, 20);
  const Ledger residents = group.Sets(1, 0)[0];
  for (const auto& [position, score] : residents) {
    const SyntheticRow row = group.Rows(0, TestTokens(0, 1, position), position);
    for (int head = 0; head < 2; ++head) {
      const std::vector<std::byte> bytes = *group.cache().ReadResident(1, 0, head, position);
      const auto* stored = reinterpret_cast<const float*>(bytes.data());
      for (int i = 0; i < 8; ++i) EXPECT_EQ(stored[i], row.k[head * 8 + i]);
    }
  }
}

// A6: a prompt attends to itself whatever the budget; in chunks as whole.
TEST(PlacesTest, APromptAttendsToAllOfItselfInChunksOfAnySize) {
  std::vector<std::vector<float>> first;
  for (const int chunk : {64, 7}) {
    for (const int budget : {60, 8}) {
      TestGroupOptions options = ByPlaces();
      options.max_step_tokens = chunk;
      TestGroup group(options);
      const SequenceOptions sequence =
          Relative(Policy::kSnapKvH2o, Scope::kKvHead, budget / 2, budget / 2, 60);
      ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 60)).ok());
      std::vector<std::vector<float>> got;
      for (int i = 0; i < 60; ++i) got.push_back(group.Attention(1, TestTokens(0, 1, i)[0], i));
      if (first.empty()) first = got;
      EXPECT_EQ(got, first);
    }
  }
}

// A7: no sequence changes another, whichever positions each has.
TEST(PlacesTest, ABatchOfPlacedAndAbsoluteSequencesEqualsEachAlone) {
  const SequenceOptions placed = Relative(Policy::kH2o, Scope::kKvHead, 6, 6, 40);
  SequenceOptions absolute = placed;
  absolute.policy.positions = Positions::kAbsolute;
  // Scores with the second sequence in the batch, and without.
  const auto run = [&](const SequenceOptions& own, const SequenceOptions* other) {
    TestGroup group(ByPlaces());
    EXPECT_TRUE(group.OpenAndRunPrompt(1, own, TestTokens(0, 40)).ok());
    if (other != nullptr) {
      EXPECT_TRUE(group.OpenAndRunPrompt(2, *other, TestTokens(1, 40)).ok());
    }
    for (int position = 40; position < 60; ++position) {
      std::vector<TestAppend> appends = {{1, TestTokens(0, 1, position)}};
      if (other != nullptr) appends.push_back({2, TestTokens(1, 1, position)});
      EXPECT_TRUE(group.Append(appends).ok());
    }
    return group.Sets(1, 1);
  };
  EXPECT_EQ(run(placed, &absolute), run(placed, nullptr));
  EXPECT_EQ(run(placed, &placed), run(placed, nullptr));
  EXPECT_NE(run(placed, nullptr), run(absolute, nullptr));
}

TEST(PlacesTest, WhatASequenceTakesIsReservedAndGivenBack) {
  TestGroupOptions options = ByPlaces();
  options.device_memory_bytes = 4 << 20;
  TestGroup group(options);
  const int64_t before = group.cache().memory().reserved_bytes();
  SequenceOptions sequence = Relative(Policy::kStreaming, Scope::kLayer, 1, 15, 60);
  const int64_t needed = *group.cache().DeviceBytesNeeded(sequence);
  sequence.policy.positions = Positions::kAbsolute;
  EXPECT_GT(needed, *group.cache().DeviceBytesNeeded(sequence));
  sequence.policy.positions = Positions::kCacheRelative;
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 60)).ok());
  for (int i = 60; i < 80; ++i) ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, i)}}).ok());
  ASSERT_TRUE(group.Close(1).ok());
  EXPECT_EQ(group.cache().memory().reserved_bytes(), before);
}

}  // namespace
}  // namespace heavywater
