// Whole ranks on a GPU: 2 to 4 of them share one device and keep what one rank alone
// keeps, bit for bit, since every rank's sums are integers. Needs a GPU.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

// On a device more than one split of the attention; the shim of one is slow.
#ifdef HEAVYWATER_CUDA_SHIM
constexpr int64_t kPromptTokens = 160;
constexpr int kSteps = 6;
#else
constexpr int64_t kPromptTokens = 700;
constexpr int kSteps = 24;
#endif

// Null without a device.
std::unique_ptr<Backend> DeviceBackend() {
  auto backend = CreateCudaBackend({});
  return backend.ok() ? *std::move(backend) : nullptr;
}

class DeviceRanksTest : public testing::TestWithParam<Scope> {
 protected:
  void SetUp() override {
    if (DeviceBackend() == nullptr) GTEST_SKIP() << CreateCudaBackend({}).status();
  }

  static TestGroupOptions Options(int world_size) {
    TestGroupOptions options;
    options.world_size = world_size;
    options.num_layers = 2;
    options.query_heads = 16;
    options.kv_heads = 4;
    options.head_dim = 64;
    options.dtype = KvDtype::kBFloat16;
    options.max_step_tokens = 256;
    options.make_backend = DeviceBackend;
    return options;
  }
  SequenceOptions Sequence() const {
    SequenceOptions sequence =
        TestSequence(Policy::kSnapKvH2o, GetParam(), 100, 40, kPromptTokens, 2 * kSteps);
    sequence.policy.plan_interval_steps = 4;
    sequence.policy.decay = 0.9;
    return sequence;
  }
};

// The prompt and some steps, by one group after the other.
std::vector<std::vector<Ledger>> SetsAfter(TestGroup& group, const SequenceOptions& sequence) {
  absl::Status status = group.OpenAndRunPrompt(1, sequence, TestTokens(1, kPromptTokens));
  EXPECT_TRUE(status.ok()) << status;
  for (int step = 0; step < kSteps && status.ok(); ++step) {
    status = group.Append({{1, TestTokens(1, 1, kPromptTokens + step)}});
    EXPECT_TRUE(status.ok()) << "step " << step << ": " << status;
  }
  std::vector<std::vector<Ledger>> sets;
  for (int layer = 0; layer < group.options().num_layers && status.ok(); ++layer) {
    sets.push_back(group.Sets(1, layer));
  }
  return sets;
}

TEST_P(DeviceRanksTest, RanksThatShareAGpuKeepWhatOneRankKeeps) {
  TestGroup alone(Options(1));
  const auto want = SetsAfter(alone, Sequence());
  ASSERT_FALSE(want.empty());
  for (const int world_size : {2, 4}) {
    TestGroup group(Options(world_size));
    EXPECT_EQ(SetsAfter(group, Sequence()), want) << world_size << " ranks";
  }
}

// Kernels in float32 beside a plain program in double: sets may differ near the cut.
TEST_P(DeviceRanksTest, RanksKeepWhatThePlainReferenceKeepsButForTheCut) {
  TestGroup group(Options(2));
  PlainSequence plain(group, Sequence().policy);
  const std::vector<int32_t> prompt = TestTokens(1, kPromptTokens);
  plain.Prompt(prompt);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, Sequence(), prompt).ok());
  int64_t different = plain.CountDifferentNearTheCut(group, 1);
  EXPECT_GE(different, 0) << "a position far from the cut differs";
  // A first difference changes all that follows.
  for (int step = 0; step < kSteps && different == 0; ++step) {
    const std::vector<int32_t> token = TestTokens(1, 1, kPromptTokens + step);
    plain.Append(token);
    ASSERT_TRUE(group.Append({{1, token}}).ok());
    different = plain.CountDifferentNearTheCut(group, 1);
    EXPECT_GE(different, 0) << "a position far from the cut differs";
  }
  RecordProperty("different_near_the_cut", static_cast<int>(different));
}

INSTANTIATE_TEST_SUITE_P(Scopes, DeviceRanksTest, testing::Values(Scope::kLayer, Scope::kKvHead),
                         [](const auto& info) { return std::string(ScopeName(info.param)); });

}  // namespace
}  // namespace heavywater
