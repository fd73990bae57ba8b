// Probabilities that do not sum to one, on one rank, in one of three sequences:
// every rank fails that one alike, and the others go on as if it had not been there.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kPromptTokens = 30;
constexpr SequenceId kBad = 2;

struct Variant {
  Scope scope;
  int world_size;
  bool cpu_backend;
};

class WrongMassTest : public ::testing::TestWithParam<Variant> {
 protected:
  TestGroupOptions Options() const {
    TestGroupOptions options;
    options.world_size = GetParam().world_size;
    options.kv_heads = 6;
    options.query_heads = 12;
    options.cpu_backend = GetParam().cpu_backend;
    return options;
  }

  SequenceOptions Sequence() const {
    return TestSequence(Policy::kSnapKvH2o, GetParam().scope, 8, 8, kPromptTokens);
  }

  int bad_rank() const { return GetParam().world_size - 1; }

  // Rows whose last head (the last rank's) has `value` in the query at `position`
  // of the bad sequence's tokens.
  RowSource RowsWith(float value, Position position) const {
    return
        [shape = TestShape(Options(), 0), value, position](int layer, int32_t token, Position at) {
          TestGroupOptions whole;
          SyntheticRow row = MakeSyntheticRow(shape, whole.seed, layer, token, at);
          const bool is_bad = token == TestTokens(static_cast<int>(kBad), 1, position)[0];
          if (is_bad && layer == 1) row.q.back() = value;
          return row;
        };
  }

  static std::vector<int32_t> Prompt(SequenceId id) {
    return TestTokens(static_cast<int>(id), kPromptTokens);
  }
  static TestAppend Next(TestGroup& group, SequenceId id, int64_t skip = 0) {
    const int64_t seen = group.cache().Stats(id)->tokens_seen;
    return {id, TestTokens(static_cast<int>(id), 1, seen + skip)};
  }

  static void Start(TestGroup& group, const SequenceOptions& sequence,
                    std::initializer_list<SequenceId> ids) {
    for (SequenceId id : ids) {
      ASSERT_TRUE(group.OpenAndRunPrompt(id, sequence, Prompt(id)).ok());
    }
  }

  static void ExpectSame(TestGroup& a, TestGroup& b, SequenceId id) {
    for (int layer = 0; layer < a.options().num_layers; ++layer) {
      EXPECT_EQ(a.Sets(id, layer), b.Sets(id, layer)) << "sequence " << id;
    }
  }

  // The rank that failed says what it saw; the others name it. What is reduced,
  // all see.
  void ExpectNamed(int rank, const absl::Status& status) const {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    const std::string message(status.message());
    const std::string name = "rank " + std::to_string(bad_rank());
    if (GetParam().scope == Scope::kLayer) {
      EXPECT_THAT(message, HasSubstr("attention received in layer 1, set 0 "));
    } else if (rank == bad_rank()) {
      EXPECT_THAT(message, AllOf(HasSubstr(name), HasSubstr("attention received in layer 1")));
    } else {
      EXPECT_THAT(message, HasSubstr(name + " reports FAILED_PRECONDITION"));
    }
  }

  // One step of all three, in which the second fails.
  void ExpectOnlyTheSecondFails(TestGroup& group) {
    const StepDescriptor descriptor =
        group.Describe({Next(group, 1), Next(group, kBad), Next(group, 3)});
    ASSERT_TRUE(group.RunStep(descriptor).ok());
    for (int rank = 0; rank < group.world_size(); ++rank) {
      const std::span<const absl::Status> status = group.step(rank).item_status();
      EXPECT_TRUE(status[0].ok()) << status[0];
      ExpectNamed(rank, status[1]);
      EXPECT_TRUE(status[2].ok()) << status[2];
    }
    EXPECT_EQ(group.cache().Stats(kBad)->tokens_seen, kPromptTokens);
  }

  // Five more steps of all three; the second takes other tokens than the one that
  // failed. Equal to a group in which nothing failed.
  void ExpectGoesOn(TestGroup& group, TestGroup& undisturbed) {
    ASSERT_TRUE(undisturbed.Append({Next(undisturbed, 1)}).ok());
    ASSERT_TRUE(undisturbed.Append({Next(undisturbed, 3)}).ok());
    for (int step = 0; step < 5; ++step) {
      for (TestGroup* each : {&group, &undisturbed}) {
        ASSERT_TRUE(
            each->Append({Next(*each, 1), Next(*each, kBad, /*skip=*/1), Next(*each, 3)}).ok());
      }
    }
    for (SequenceId id : {1, 2, 3}) ExpectSame(group, undisturbed, id);
  }
};

TEST_P(WrongMassTest, GainsOfOneRankInAStepFailThatSequenceOnEveryRank) {
  const int64_t one = int64_t{1} << 32;
  // Too much; what NaN leaves behind; parts that cancel out.
  const std::vector<std::pair<int64_t, int64_t>> wrong = {
      {one, 0}, {std::numeric_limits<int64_t>::min(), 0}, {16 * one, -16 * one}};
  for (const auto& [first, second] : wrong) {
    TestGroup group(Options());
    TestGroup undisturbed(Options());
    for (TestGroup* each : {&group, &undisturbed}) Start(*each, Sequence(), {1, 2, 3});
    const LayerView layer = (*group.cache(bad_rank()).Find(kBad))->View(1);
    layer.gains.device_address()[3] += first;
    layer.gains.device_address()[4] += second;
    ExpectOnlyTheSecondFails(group);
    ExpectGoesOn(group, undisturbed);
  }
}

TEST_P(WrongMassTest, QueriesOfOneRankInAStepThatAreNoNumbersFailThatSequenceOnEveryRank) {
  for (float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    TestGroupOptions options = Options();
    options.rows = RowsWith(value, kPromptTokens);
    TestGroup group(options);
    TestGroup undisturbed(Options());
    for (TestGroup* each : {&group, &undisturbed}) Start(*each, Sequence(), {1, 2, 3});
    ExpectOnlyTheSecondFails(group);
    ExpectGoesOn(group, undisturbed);
  }
}

TEST_P(WrongMassTest, QueriesOfOneRankInAPromptThatAreNoNumbersFailThatSequenceOnEveryRank) {
  for (float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    TestGroupOptions options = Options();
    options.rows = RowsWith(value, kPromptTokens - 1);
    TestGroup group(options);
    TestGroup undisturbed(Options());
    for (TestGroup* each : {&group, &undisturbed}) Start(*each, Sequence(), {1, 3});
    ASSERT_TRUE(group.Open(kBad, Sequence()).ok());
    // RunPrompt() checks that all ranks return the same code.
    group.RunPrompt(kBad, Prompt(kBad)).IgnoreError();
    for (int rank = 0; rank < group.world_size(); ++rank) {
      ExpectNamed(rank, group.statuses()[rank]);
    }
    ASSERT_TRUE(group.Close(kBad).ok());
    // The same sequence again, without what was wrong, and then all three.
    std::vector<int32_t> prompt = Prompt(kBad);
    prompt.back() = 1;
    for (TestGroup* each : {&group, &undisturbed}) {
      ASSERT_TRUE(each->OpenAndRunPrompt(kBad, Sequence(), prompt).ok());
      for (int step = 0; step < 5; ++step) {
        ASSERT_TRUE(each->Append({Next(*each, 1), Next(*each, kBad), Next(*each, 3)}).ok());
      }
    }
    for (SequenceId id : {1, 2, 3}) ExpectSame(group, undisturbed, id);
  }
}

// One rank cannot run the step at all, the other finds it wrong: both lose what
// was gained since the last plan.
TEST(WrongMassBetweenPlansTest, RanksThatFailForDifferentReasonsLoseTheSameGains) {
  TestGroupOptions options;
  options.world_size = 2;
  options.device_memory_bytes = 1 << 20;
  TestGroup group(options);
  SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kKvHead, 8, 8, kPromptTokens);
  sequence.policy.plan_interval_steps = 4;
  PlainSequence plain(group, sequence.policy);
  plain.Prompt(TestTokens(1, kPromptTokens));
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(1, kPromptTokens)).ok());
  plain.Append(TestTokens(1, 1, kPromptTokens), /*plan_due=*/false);
  ASSERT_TRUE(group.Append({{1, TestTokens(1, 1, kPromptTokens)}}).ok());
  {
    DeviceMemory& memory = group.cache(0).mutable_memory();
    const DeviceMemory::Reservation rest = *memory.Reserve(memory.free_bytes() - 100, "the rest");
    (*group.cache(1).Find(1))->View(0).gains.device_address()[3] += int64_t{1} << 32;
    StepDescriptor descriptor = group.Describe({{1, TestTokens(1, 40, kPromptTokens + 1)}});
    descriptor.items[0].plan_due = true;
    ASSERT_TRUE(group.RunStep(descriptor).ok());
    EXPECT_EQ(group.step(0).item_status()[0].code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(group.step(1).item_status()[0].code(), absl::StatusCode::kFailedPrecondition);
  }
  plain.ForgetGains();
  plain.Append(TestTokens(1, 1, kPromptTokens + 1), /*plan_due=*/true);
  StepDescriptor descriptor = group.Describe({{1, TestTokens(1, 1, kPromptTokens + 1)}});
  descriptor.items[0].plan_due = true;
  ASSERT_TRUE(group.RunStep(descriptor).ok());
  ASSERT_TRUE(group.step(0).item_status()[0].ok()) << group.step(0).item_status()[0];
  EXPECT_EQ(plain.Compare(group, 1, 1000), "");
}

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
    for (int world : {1, 2, 3}) {
      for (bool cpu : {false, true}) variants.push_back({scope, world, cpu});
    }
  }
  return variants;
}

std::string VariantName(const ::testing::TestParamInfo<Variant>& info) {
  return std::string(ScopeName(info.param.scope)) + "_tp" + std::to_string(info.param.world_size) +
         (info.param.cpu_backend ? "_cpu" : "_reference");
}

INSTANTIATE_TEST_SUITE_P(All, WrongMassTest, ::testing::ValuesIn(Variants()), VariantName);

}  // namespace
}  // namespace heavywater
