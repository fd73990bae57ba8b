// The backend's scratch is device memory: counted, reserved with admission, and
// refused by name.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPromptTokens = 200;

class ScratchTest : public ::testing::TestWithParam<Policy> {
 protected:
  static TestGroupOptions Options() {
    TestGroupOptions options;
    options.cpu_backend = true;
    options.max_step_tokens = 16;
    return options;
  }
  static SequenceOptions Sequence(int64_t prompt_tokens = kPromptTokens) {
    return TestSequence(GetParam(), Scope::kLayer, 12, 6, prompt_tokens, 40);
  }
  static const MemoryGauge& Gauge(TestGroup& group) {
    return group.cache().memory().gauge(MemoryKind::kScratch);
  }
};

TEST_P(ScratchTest, TheGaugeShowsWhatPromptAndStepsWorkIn) {
  TestGroup group(Options());
  const KvShape shape = TestShape(Options(), 0);
  Backend& backend = group.cache().backend();
  EXPECT_EQ(Gauge(group).current_bytes, 0);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, Sequence(), TestTokens(1, kPromptTokens)).ok());
  EXPECT_EQ(Gauge(group).peak_bytes, backend.PromptScratchBytes(shape, kPromptTokens));
  EXPECT_EQ(Gauge(group).current_bytes, 0);
  ASSERT_TRUE(group.Append({{1, TestTokens(1, 1, kPromptTokens)}}).ok());
  // A block of slots is the least that a step works in.
  EXPECT_EQ(Gauge(group).current_bytes, backend.AttendScratchBytes(shape, 1));
  ASSERT_TRUE(group.Close(1).ok());
  EXPECT_EQ(Gauge(group).current_bytes, 0);
}

TEST_P(ScratchTest, AdmissionReservesIt) {
  const KvShape shape = TestShape(Options(), 0);
  TestGroupOptions reference = Options();
  reference.cpu_backend = false;
  TestGroup without(reference);
  TestGroup with(Options());
  EXPECT_EQ(*with.cache().DeviceBytesNeeded(Sequence()),
            *without.cache().DeviceBytesNeeded(Sequence()) +
                with.cache().backend().PromptScratchBytes(shape, kPromptTokens) +
                with.cache().backend().AttendScratchBytes(shape, 1));
}

// Two sequences live through prompts and steps within exactly what admission
// reserved; a byte less, and the second is refused by name.
TEST_P(ScratchTest, WhatIsAllocatedStaysWithinWhatWasReserved) {
  TestGroupOptions options = Options();
  int64_t need = 0;
  {
    TestGroup unlimited(options);
    need = *unlimited.cache().DeviceBytesNeeded(Sequence());
    options.device_memory_bytes = unlimited.cache().memory().reserved_bytes() + 2 * need;
  }
  TestGroup group(options);
  ASSERT_TRUE(group.Open(1, Sequence()).ok());
  ASSERT_TRUE(group.OpenAndRunPrompt(2, Sequence(), TestTokens(2, kPromptTokens)).ok());
  ASSERT_TRUE(group.RunPrompt(1, TestTokens(1, kPromptTokens)).ok());
  for (int64_t i = kPromptTokens; i < kPromptTokens + 40; ++i) {
    const absl::Status status = group.Append({{1, TestTokens(1, 1, i)}, {2, TestTokens(2, 1, i)}});
    ASSERT_TRUE(status.ok()) << status;
  }
  options.device_memory_bytes -= 1;
  TestGroup smaller(options);
  ASSERT_TRUE(smaller.Open(1, Sequence()).ok());
  const absl::Status refused = smaller.Open(2, Sequence());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  const std::string message(refused.message());
  EXPECT_THAT(message, HasSubstr("needs " + std::to_string(need)));
  EXPECT_THAT(message, HasSubstr("limit " + std::to_string(options.device_memory_bytes)));
  const int64_t longest = smaller.cache().LongestPromptThatFits(Sequence());
  EXPECT_THAT(message, HasSubstr("longest prompt that fits has " + std::to_string(longest)));
  EXPECT_TRUE(smaller.Open(2, Sequence(longest)).ok());
}

// An append takes more slots for a while, and more scratch with them.
TEST_P(ScratchTest, ALongAppendExtendsItAndGivesItBack) {
  TestGroupOptions options = Options();
  options.max_step_tokens = 1024;
  options.device_memory_bytes = 16 << 20;
  TestGroup group(options);
  const SequenceOptions sequence = TestSequence(GetParam(), Scope::kLayer, 12, 6, 50, 2000);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(1, 50)).ok());
  const int64_t reserved = group.cache().memory().reserved_bytes();
  const absl::Status status = group.Append({{1, TestTokens(1, 1000, 50)}});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_GE(Gauge(group).peak_bytes,
            group.cache().backend().AttendScratchBytes(TestShape(options, 0), 1000));
  EXPECT_EQ(group.cache().memory().reserved_bytes(), reserved);
  EXPECT_TRUE(group.Append({{1, TestTokens(1, 1, 1050)}}).ok());
}

// Sequences whose KV heads hold sets of different sizes, and one whose heads do not, within
// what admission reserved: each rank for the most that its heads can get.
TEST(DividedScratchTest, WhatIsAllocatedStaysWithinWhatWasReserved) {
  for (const Policy policy : {Policy::kH2o, Policy::kSnapKv, Policy::kScissorhands}) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(std::string(PolicyName(policy)) + " on " + std::to_string(ranks));
      TestGroupOptions options;
      options.cpu_backend = true;
      options.world_size = ranks;
      options.kv_heads = 3;
      options.query_heads = 6;
      SequenceOptions divided = TestSequence(policy, Scope::kKvHead, 40, 12, kPromptTokens, 60);
      divided.policy.head_budgets = HeadBudgets::kAdaptive;
      divided.policy.head_budget_floor = 0;
      divided.policy.plan_interval_steps = 3;
      const SequenceOptions even = TestSequence(Policy::kH2o, Scope::kLayer, 20, 6, 30, 60);
      {
        TestGroup unlimited(options);
        options.device_memory_bytes = unlimited.cache().memory().reserved_bytes() +
                                      *unlimited.cache().DeviceBytesNeeded(even) +
                                      2 * *unlimited.cache().DeviceBytesNeeded(divided);
      }
      TestGroup group(options);
      ASSERT_TRUE(group.Open(1, divided).ok());
      ASSERT_TRUE(group.OpenAndRunPrompt(3, even, TestTokens(3, 30)).ok());
      ASSERT_TRUE(group.OpenAndRunPrompt(2, divided, TestTokens(2, kPromptTokens)).ok());
      ASSERT_TRUE(group.RunPrompt(1, TestTokens(1, kPromptTokens)).ok());
      for (int64_t i = 0; i < 40; ++i) {
        const absl::Status status = group.Append({{1, TestTokens(1, 1, kPromptTokens + i)},
                                                  {3, TestTokens(3, 1, 30 + i)},
                                                  {2, TestTokens(2, 1, kPromptTokens + i)}});
        ASSERT_TRUE(status.ok()) << status;
      }
      options.device_memory_bytes -= 1;
      TestGroup smaller(options);
      ASSERT_TRUE(smaller.Open(3, even).ok());
      ASSERT_TRUE(smaller.Open(1, divided).ok());
      EXPECT_EQ(smaller.Open(2, divided).code(), absl::StatusCode::kResourceExhausted);
    }
  }
}

// Without a bound on new tokens each KV head has whole pages: alike, eight heads may round up
// more of them than the division with the largest one does.
TEST(DividedScratchTest, WholePagesOfAnyDivisionStayWithinWhatWasReserved) {
  for (const int kept : {20, 33, 40, 48}) {
    TestGroupOptions options;
    options.num_layers = 48;
    options.kv_heads = 8;
    options.query_heads = 8;
    SequenceOptions sequence =
        TestSequence(Policy::kSnapKv, Scope::kKvHead, kept, 4, 80, /*more_tokens=*/6);
    sequence.policy.head_budgets = HeadBudgets::kAdaptive;
    sequence.policy.head_budget_floor = 0.2;
    sequence.policy.window = 4;
    sequence.policy.sink_tokens = 0;
    TestGroup group(options);
    const absl::Status status = group.OpenAndRunPrompt(1, sequence, TestTokens(1, 80));
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(DividedScratchTest, ARankOfManyReservesForTheMostThatItsHeadCanGet) {
  TestGroupOptions options;
  options.world_size = 3;
  options.kv_heads = 3;
  options.query_heads = 3;
  SequenceOptions sequence =
      TestSequence(Policy::kH2o, Scope::kKvHead, 60, 40, 400, /*more_tokens=*/60);
  TestGroup group(options);
  const int64_t even = *group.cache().DeviceBytesNeeded(sequence);
  sequence.policy.head_budgets = HeadBudgets::kAdaptive;
  // 60 beyond the recent ones: at most 3 x 60 less two floors of 12.
  const int64_t more_slots = 3 * 60 - 2 * 12 - 60;
  const int64_t divided = *group.cache().DeviceBytesNeeded(sequence);
  const KvShape shape = TestShape(options, 0);
  const int64_t kv = options.num_layers * more_slots * shape.row_bytes();
  EXPECT_GT(divided - even, kv);
  EXPECT_LT(divided - even, 3 * kv);  // with scores, tables, and two rows of the prompt's sums
}

TEST(DividedScratchTest, MoreRanksThanKvHeadsAreRefused) {
  TestGroupOptions options;
  options.world_size = 2;
  options.kv_heads = 1;
  options.query_heads = 2;
  TestGroup group(options);
  SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kKvHead, 8, 8, 40);
  sequence.policy.head_budgets = HeadBudgets::kAdaptive;
  const absl::Status status = group.Open(1, sequence);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("head_budgets is adaptive, but 2 ranks share the model's 1 KV heads"));
}

INSTANTIATE_TEST_SUITE_P(All, ScratchTest,
                         ::testing::Values(Policy::kFull, Policy::kH2o, Policy::kSnapKvH2o),
                         [](const auto& info) { return std::string(PolicyName(info.param)); });

TEST(BackendShapeTest, AShapeThatTheBackendCannotRunIsRefusedAtOnce) {
  for (bool cpu : {false, true}) {
    TestGroupOptions group;
    RankCacheOptions options;
    options.shape = TestShape(group, 0);
    options.shape.head_dim = 12;
    options.hidden_size = 4;
    options.vocab_size = 8;
    const std::unique_ptr<Backend> backend = cpu ? *CreateCpuBackend({}) : CreateReferenceBackend();
    const absl::Status status = RankCache::Create(options, *backend, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("head_dim is 12, want a positive multiple of 8"));
  }
}

}  // namespace
}  // namespace heavywater
