// The same sequence in another batch, chunk size or group: the same result, bit
// for bit.
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

struct Variant {
  Policy policy;
  Scope scope;
  int world_size;
  bool cpu_backend;
};

class BatchTest : public ::testing::TestWithParam<Variant> {
 protected:
  TestGroupOptions Options() const {
    TestGroupOptions options;
    options.world_size = GetParam().world_size;
    options.kv_heads = 2;
    options.query_heads = 4;
    options.cpu_backend = GetParam().cpu_backend;
    return options;
  }

  SequenceOptions Sequence(int64_t prompt_tokens) const {
    return TestSequence(GetParam().policy, GetParam().scope, 12, 8, prompt_tokens);
  }

  // Attention, positions and scores, all bits.
  static void ExpectSame(TestGroup& a, TestGroup& b, SequenceId id, int tag, int64_t seen) {
    for (int layer = 0; layer < a.options().num_layers; ++layer) {
      EXPECT_EQ(a.Sets(id, layer), b.Sets(id, layer)) << "sequence " << id;
      const int32_t last = TestTokens(tag, 1, seen - 1)[0];
      EXPECT_EQ(a.Attention(layer, last, static_cast<Position>(seen - 1)),
                b.Attention(layer, last, static_cast<Position>(seen - 1)))
          << "sequence " << id;
    }
  }
};

TEST_P(BatchTest, ARaggedBatchEqualsEachSequenceAlone) {
  const std::vector<int64_t> lengths = {33, 5, 60};
  TestGroup together(Options());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(
        together.OpenAndRunPrompt(i + 1, Sequence(lengths[i]), TestTokens(i, lengths[i])).ok());
  }
  for (int step = 0; step < 20; ++step) {
    std::vector<TestAppend> appends;
    for (int i = 0; i < 3; ++i) appends.push_back({i + 1ull, TestTokens(i, 1, lengths[i] + step)});
    ASSERT_TRUE(together.Append(appends).ok());
  }
  for (int i = 0; i < 3; ++i) {
    TestGroup alone(Options());
    ASSERT_TRUE(
        alone.OpenAndRunPrompt(i + 1, Sequence(lengths[i]), TestTokens(i, lengths[i])).ok());
    for (int step = 0; step < 20; ++step) {
      ASSERT_TRUE(alone.Append({{i + 1ull, TestTokens(i, 1, lengths[i] + step)}}).ok());
    }
    ExpectSame(together, alone, i + 1, i, lengths[i] + 20);
  }
}

TEST_P(BatchTest, AChunkedPromptEqualsAWholeOne) {
  TestGroupOptions options = Options();
  options.max_step_tokens = 64;
  TestGroup whole(options);
  ASSERT_TRUE(whole.OpenAndRunPrompt(1, Sequence(61), TestTokens(0, 61)).ok());
  for (int chunk : {1, 7, 60}) {
    options.max_step_tokens = chunk;
    TestGroup chunked(options);
    ASSERT_TRUE(chunked.OpenAndRunPrompt(1, Sequence(61), TestTokens(0, 61)).ok());
    ExpectSame(whole, chunked, 1, 0, 61);
  }
}

TEST_P(BatchTest, StepsOfOthersBetweenChunksOfAPromptChangeNothing) {
  TestGroupOptions options = Options();
  options.max_step_tokens = 10;
  TestGroup quiet(options);
  ASSERT_TRUE(quiet.OpenAndRunPrompt(2, Sequence(35), TestTokens(2, 35)).ok());

  TestGroup busy(options);
  ASSERT_TRUE(busy.OpenAndRunPrompt(1, Sequence(20), TestTokens(1, 20)).ok());
  ASSERT_TRUE(busy.Open(2, Sequence(35)).ok());
  int64_t seen = 20;
  // The reduce of the prompt's layer is between RunPrompt's own calls; here
  // steps happen at every cut by way of the tamper hook.
  bool inside = false;
  busy.tamper = [&](std::vector<DeviceSpan<int64_t>>&) {
    if (inside) return;
    inside = true;
    ASSERT_TRUE(busy.Append({{1, TestTokens(1, 1, seen++)}}).ok());
    inside = false;
  };
  ASSERT_TRUE(busy.RunPrompt(2, TestTokens(2, 35)).ok());
  busy.tamper = nullptr;
  EXPECT_EQ(seen, 22);  // one step for each layer
  ExpectSame(quiet, busy, 2, 2, 35);
}

std::string VariantName(const ::testing::TestParamInfo<Variant>& info) {
  return std::string(PolicyName(info.param.policy)) + "_" +
         std::string(ScopeName(info.param.scope)) + "_tp" + std::to_string(info.param.world_size) +
         (info.param.cpu_backend ? "_cpu" : "_reference");
}

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (Policy policy :
       {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv, Policy::kSnapKvH2o}) {
    for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
      for (int world : {1, 2}) {
        for (bool cpu : {false, true}) variants.push_back({policy, scope, world, cpu});
      }
    }
  }
  return variants;
}

INSTANTIATE_TEST_SUITE_P(All, BatchTest, ::testing::ValuesIn(Variants()), VariantName);

// TP sizes give the same sets on identical inputs, scope kv_head head by head.
TEST(GroupSizeTest, TheSizeOfTheGroupChangesNoSetAndNoScore) {
  for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
    std::vector<std::vector<Ledger>> first;
    for (int world : {1, 2, 3, 6, 12}) {
      TestGroupOptions options;
      options.world_size = world;
      options.kv_heads = 6;
      options.query_heads = 12;
      TestGroup group(options);
      const SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, scope, 8, 8, 50);
      ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 50)).ok());
      for (int step = 0; step < 10; ++step) {
        ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, 50 + step)}}).ok());
      }
      std::vector<std::vector<Ledger>> sets;
      for (int layer = 0; layer < 2; ++layer) sets.push_back(group.Sets(1, layer));
      EXPECT_EQ(sets[0].size(), scope == Scope::kLayer ? 1u : 6u);
      if (world == 1) first = sets;
      EXPECT_EQ(sets, first) << world << " ranks";
    }
  }
}

// The same through a real communicator, ranks as threads.
TEST(GroupSizeTest, RanksAsThreadsOverACommunicatorDoTheSame) {
  TestGroupOptions options;
  options.world_size = 2;
  TestGroup by_hand(options);
  TestGroup threaded(options);
  const SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 8, 8, 40);
  ASSERT_TRUE(by_hand.OpenAndRunPrompt(1, sequence, TestTokens(0, 40)).ok());
  ASSERT_TRUE(threaded.Open(1, sequence).ok());
  std::vector<StepDescriptor> descriptors;
  for (int step = 0; step < 8; ++step) {
    descriptors.push_back(by_hand.Describe({{1, TestTokens(0, 1, 40 + step)}}));
    ASSERT_TRUE(by_hand.RunStep(descriptors.back()).ok());
  }
  auto communicators = CreateLocalGroup(2, absl::Seconds(20));
  std::vector<absl::Status> statuses(2);
  const auto run = [&](int rank) -> absl::Status {
    auto pass =
        PromptPass::Create(threaded.cache(rank), threaded.model(rank), 1, TestTokens(0, 40));
    if (!pass.ok()) return pass.status();
    if (auto logits = (*pass)->Run(*communicators[rank]); !logits.ok()) return logits.status();
    for (const StepDescriptor& descriptor : descriptors) {
      absl::Status status = threaded.step(rank).Run(descriptor, *communicators[rank]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  std::thread other([&] { statuses[1] = run(1); });
  statuses[0] = run(0);
  other.join();
  ASSERT_TRUE(statuses[0].ok()) << statuses[0];
  ASSERT_TRUE(statuses[1].ok()) << statuses[1];
  for (int layer = 0; layer < 2; ++layer)
    EXPECT_EQ(by_hand.Sets(1, layer), threaded.Sets(1, layer));
}

}  // namespace
}  // namespace heavywater
