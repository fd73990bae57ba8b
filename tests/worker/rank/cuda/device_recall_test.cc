// Whole ranks with recall on a GPU: what leaves the device lies in a host tier that is
// registered with it, picks are read there by the kernels, promoted rows come from there,
// and positions, scores and outputs are those of the plain reference. Needs a GPU.
#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/local_host_tier.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/rank/registered_tier.h"
#ifdef HEAVYWATER_CUDA_SHIM
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#endif

namespace heavywater {
namespace {

constexpr int64_t kPromptTokens = 90;
constexpr int kSteps = 24;
// Of scores, in units of 2^-32: 1e-5 of a query's attention. Sums are of floats.
constexpr int64_t kTolerance = 43000;

// Each rank's backend, as long as its tier has memory.
struct Device {
  Backend* backend = nullptr;
  std::unique_ptr<LocalHostTier> tier;
};

class DeviceGroup {
 public:
  explicit DeviceGroup(TestGroupOptions options) {
    devices_.resize(options.world_size);
    for (Device& device : devices_) {
      device.tier = std::make_unique<LocalHostTier>(
          int64_t{1} << 26,
          HostMemoryHooks{.on_allocated =
                              [&device](auto memory) {
                                return RegisteredWith(*device.backend).on_allocated(memory);
                              },
                          .on_freeing =
                              [&device](auto memory) {
                                return RegisteredWith(*device.backend).on_freeing(memory);
                              }});
      options.tiers.push_back(device.tier.get());
    }
    options.make_backend = [this, made = size_t{0}]() mutable {
      std::unique_ptr<Backend> backend = CreateCudaBackend({}).value();
      devices_[made++].backend = backend.get();
      return backend;
    };
    group_ = std::make_unique<TestGroup>(options);
  }
  ~DeviceGroup() {
    group_.reset();  // its sequences, and then its backends
    for (const Device& device : devices_) {
      EXPECT_EQ(device.tier->reserved_bytes(), 0);
      EXPECT_EQ(device.tier->stuck_bytes(), 0);
    }
  }
  TestGroup& operator*() { return *group_; }
  TestGroup* operator->() { return group_.get(); }

  RecallStats Stats(SequenceId sequence) {
    RecallStats sum;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      const RecallStats stats = (*group_->cache(rank).Find(sequence))->recall()->stats();
      sum.reads += stats.reads;
      sum.promoted += stats.promoted;
    }
    return sum;
  }

 private:
  std::vector<Device> devices_;
  std::unique_ptr<TestGroup> group_;
};

struct Case {
  int world_size = 1;
  Scope scope = Scope::kLayer;
  bool all = false;
};

class DeviceRecallTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
#ifdef HEAVYWATER_CUDA_SHIM
    // As late as CUDA allows: what lacks a synchronisation then reads too early.
    cuda_shim::SetOptions({.progress = cuda_shim::Progress::kLate});
#endif
    const auto backend = CreateCudaBackend({});
    if (!backend.ok()) GTEST_SKIP() << backend.status();
  }
  void TearDown() override {
#ifdef HEAVYWATER_CUDA_SHIM
    EXPECT_EQ(cuda_shim::TakeFailure(), "");
    cuda_shim::SetOptions({});
#endif
  }
  static TestGroupOptions Options() {
    TestGroupOptions options;
    options.world_size = GetParam().world_size;
    options.query_heads = 8;
    options.kv_heads = 2;
    options.head_dim = 32;
    options.max_step_tokens = 128;
    return options;
  }
  static SequenceOptions Sequence() {
    SequenceOptions sequence =
        TestSequence(Policy::kSnapKvH2o, GetParam().scope, 16, 8, kPromptTokens, 2 * kSteps);
    sequence.policy.plan_interval_steps = 4;
    sequence.policy.decay = 0.9;
    sequence.policy.recall.enabled = true;
    sequence.policy.recall.all = GetParam().all;
    sequence.policy.recall.recall_tokens = 12;
    return sequence;
  }
};

TEST_P(DeviceRecallTest, PicksPromotionsAndOutputsEqualThePlainReference) {
  DeviceGroup group(Options());
  PlainSequence plain(*group, Sequence().policy);
  const std::vector<int32_t> prompt = TestTokens(1, kPromptTokens);
  plain.Prompt(prompt);
  const absl::Status opened = group->OpenAndRunPrompt(1, Sequence(), prompt);
  ASSERT_TRUE(opened.ok()) << opened;
  ASSERT_EQ(plain.Compare(*group, 1, kTolerance), "") << "after the prompt";
#ifdef HEAVYWATER_CUDA_SHIM
  cuda_shim::ResetCounters();
#endif
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<int32_t> token = TestTokens(1, 1, kPromptTokens + step);
    plain.Append(token);
    const absl::Status status = group->Append({{1, token}});
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(plain.Compare(*group, 1, kTolerance), "") << "step " << step;
  }
  const RecallStats stats = group.Stats(1);
  EXPECT_GT(stats.reads, kSteps);
  EXPECT_GT(stats.promoted, 0);
#ifdef HEAVYWATER_CUDA_SHIM
  // By kernels, over the bus, and no row more.
  const int64_t row_bytes = TestShape(Options(), 0).row_bytes();
  EXPECT_GE(cuda_shim::ReadCounters().host_loaded, stats.reads * row_bytes);
#endif
  ASSERT_TRUE(group->Close(1).ok());
}

// The memory of what is closed is the tier's again, while others go on.
TEST_P(DeviceRecallTest, ASequenceThatEndsTakesItsHostMemoryFromTheDevice) {
  DeviceGroup group(Options());
  for (const SequenceId id : {1, 2}) {
    ASSERT_TRUE(
        group->OpenAndRunPrompt(id, Sequence(), TestTokens(static_cast<int>(id), kPromptTokens))
            .ok());
  }
  ASSERT_TRUE(group->Append({{1, TestTokens(1, 1, kPromptTokens)}}).ok());
  ASSERT_TRUE(group->Close(1).ok());
  for (int step = 0; step < 4; ++step) {
    const absl::Status status = group->Append({{2, TestTokens(2, 1, kPromptTokens + step)}});
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_TRUE(group->OpenAndRunPrompt(3, Sequence(), TestTokens(3, kPromptTokens)).ok());
}

INSTANTIATE_TEST_SUITE_P(Cases, DeviceRecallTest,
                         testing::Values(Case{1, Scope::kLayer}, Case{2, Scope::kLayer},
                                         Case{1, Scope::kKvHead}, Case{2, Scope::kKvHead},
                                         Case{2, Scope::kLayer, /*all=*/true}),
                         [](const auto& info) {
                           return std::string(ScopeName(info.param.scope)) + "_tp" +
                                  std::to_string(info.param.world_size) +
                                  (info.param.all ? "_all" : "");
                         });

}  // namespace
}  // namespace heavywater
