// The plan is what a worker really reserves and allocates.
#include "worker/sizing/memory_plan.h"

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/model/llama_weights.h"
#include "worker/model/rank_shard.h"
#include "worker/rank/rank_cache.h"
#include "worker/sizing/model_presets.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30;

// No scratch at all, so that sums stay plain.
const ScratchSizes kNoScratch;

Deployment Llama8b(const char* policy, int64_t context) {
  Deployment deployment;
  deployment.model = ModelPreset("llama-3-8b").value();
  deployment.policy = Preset(policy).value();
  deployment.context_tokens = context;
  return deployment;
}

MemoryPlan Plan(const Deployment& deployment) {
  const auto plan = PlanMemory(deployment, kNoScratch);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

// A worker of the deployment: memory is only counted until something is written.
std::unique_ptr<RankCache> Worker(const Deployment& deployment, Backend& backend) {
  const ModelConfig& model = deployment.model;
  const RankShard shard = MakeRankShard(model, 0, deployment.world_size).value();
  return RankCache::Create({.shape = MakeKvShape(model, shard, {.dtype = deployment.kv_dtype}),
                            .world_size = deployment.world_size,
                            .hidden_size = model.hidden_size,
                            .vocab_size = model.vocab_size,
                            .max_step_tokens = deployment.max_step_tokens},
                           backend, nullptr)
      .value();
}

TEST(MemoryPlanTest, IsWhatAWorkerReservesForEachPolicy) {
  for (const char* policy : {"full", "streaming", "h2o", "snapkv", "snapkv_h2o", "recall"}) {
    for (const int world_size : {1, 2, 8}) {
      Deployment deployment = Llama8b(policy, 20000);
      deployment.world_size = world_size;
      const auto backend = CreateReferenceBackend();
      const auto worker = Worker(deployment, *backend);
      const MemoryPlan plan = PlanMemory(deployment, *backend).value();
      EXPECT_EQ(plan.device.workspace, worker->memory().reserved_bytes());
      const SequenceOptions sequence = {
          .policy = deployment.policy, .prompt_tokens = 20000 - 1024, .max_tokens = 20000};
      EXPECT_EQ(plan.device.sequences(), worker->DeviceBytesNeeded(sequence).value())
          << policy << " on " << world_size;
    }
  }
}

TEST(MemoryPlanTest, CountsTheScratchOfTheBackendThatWillRun) {
  struct : ScratchSizes {
    int64_t AttendScratchBytes(const KvShape&, int64_t capacity,
                               const RecallLimits&) const override {
      return 7 * capacity;
    }
    int64_t PromptScratchBytes(const KvShape&, int64_t num_keys) const override {
      return 3 * num_keys;
    }
  } scratch;
  const Deployment deployment = Llama8b("snapkv_h2o", 8192);
  const DeviceNeed without = Plan(deployment).device;
  const DeviceNeed with = PlanMemory(deployment, scratch)->device;
  const int64_t capacity = Plan(deployment).budget.budget_tokens + 1;
  EXPECT_EQ(with.sequence.step - without.sequence.step, 7 * capacity);
  EXPECT_EQ(with.sequence.prompt - without.sequence.prompt, 3 * (8192 - 1024));
}

// The CPU's loader keeps the same matrices in float32.
TEST(MemoryPlanTest, WeightsAreWhatALoaderAllocatesAtHalfTheBytes) {
  for (const bool tied : {true, false}) {
    for (const int size : {1, 3}) {
      const TinyLlama llama({.tied = tied}, 1);
      const TemporaryFile path(llama.File());
      const std::unique_ptr<GgufFile> file = GgufFile::Open(path.path()).value();
      const ModelConfig config = ReadModelConfig(*file).value();
      const RankShard shard = MakeRankShard(config, 0, size).value();
      const auto backend = CreateReferenceBackend();
      const LlamaWeights weights = LoadLlamaWeights(*file, config, shard, *backend).value();
      Deployment deployment = Llama8b("full", 2000);
      deployment.model = config;
      deployment.world_size = size;
      const MemoryPlan plan = Plan(deployment);
      // Norms are float32 everywhere, and parts begin at other boundaries.
      EXPECT_NEAR(plan.device.weights, weights.memory.bytes() / 2, 4096);
      const int64_t embedding = weights.embedding.rows * weights.embedding.cols * 2;
      EXPECT_EQ(plan.device.weights - plan.step.weights, tied ? 0 : embedding);
    }
  }
}

TEST(MemoryPlanTest, TheRunnersActivationsGrowWithTheRowsOfAStep) {
  Deployment deployment = Llama8b("full", 8192);
  const DeviceNeed need = Plan(deployment).device;
  EXPECT_GT(need.runner, int64_t{512} * (2 * 14336 + 4096) * 4);
  EXPECT_EQ(need.total(),
            need.weights + need.runner + need.prompt_hidden + need.workspace + need.sequences());
  deployment.max_step_tokens = 1024;
  EXPECT_GT(Plan(deployment).device.runner, need.runner);
}

// The figures that everybody knows: 8.03 and 70.6 billion parameters, 128 and 320 KiB of
// keys and values a token.
TEST(MemoryPlanTest, KnowsTheSizesOfLlama3) {
  const MemoryPlan small = Plan(Llama8b("full", 131072));
  EXPECT_NEAR(static_cast<double>(small.device.weights), 2 * 8.03e9, 2e7);
  EXPECT_EQ(small.full_kv_bytes, 16 * kGib);
  EXPECT_EQ(small.host_bytes, 16 * kGib);
  Deployment deployment = Llama8b("full", 131072);
  deployment.model = ModelPreset("llama-3-70b").value();
  const MemoryPlan large = Plan(deployment);
  EXPECT_NEAR(static_cast<double>(large.device.weights), 2 * 70.55e9, 2e8);
  EXPECT_EQ(large.full_kv_bytes, 40 * kGib);
}

TEST(MemoryPlanTest, ASplitOverGpusSplitsWeightsAndKv) {
  Deployment deployment = Llama8b("full", 65536);
  const MemoryPlan one = Plan(deployment);
  deployment.world_size = 4;
  const MemoryPlan four = Plan(deployment);
  EXPECT_EQ(four.full_kv_bytes * 4, one.full_kv_bytes);
  EXPECT_NEAR(static_cast<double>(four.device.weights), one.device.weights / 4.0, 1e6);
  EXPECT_EQ(four.step.kv * 4, one.step.kv);
  EXPECT_EQ(four.device.prompt_hidden, one.device.prompt_hidden);  // each rank has all of it
}

TEST(MemoryPlanTest, RecallHoldsAFifthOfTheFullCacheAfterTheLongestPrompt) {
  Deployment deployment = Llama8b("recall", 131072);
  deployment.new_tokens = 1;
  const MemoryPlan plan = Plan(deployment);
  const double ratio = static_cast<double>(plan.kv_bytes) / static_cast<double>(plan.full_kv_bytes);
  EXPECT_GT(ratio, 0.18);
  EXPECT_LT(ratio, 0.20);
  // A step reads slots and sketches, and at most 64 picks of 512 bytes over the bus.
  EXPECT_EQ(plan.step.host, int64_t{64} * 8 * 32 * 512);
  EXPECT_GT(plan.step.sketches, 0);
  EXPECT_EQ(plan.step.kv, plan.resident_tokens * 32 * 8 * 512);
  EXPECT_LT(plan.step.kv + plan.step.scores + plan.step.sketches, plan.full_kv_bytes / 4);
}

TEST(MemoryPlanTest, SequencesAddUpAndOneIsInItsPrompt) {
  Deployment deployment = Llama8b("snapkv_h2o", 32768);
  const DeviceNeed one = Plan(deployment).device;
  deployment.num_sequences = 3;
  const MemoryPlan three = Plan(deployment);
  EXPECT_EQ(three.device.total() - one.total(), 2 * one.sequence.steady());
  EXPECT_EQ(three.host_bytes, 3 * three.full_kv_bytes);
  EXPECT_EQ(three.step.kv, 3 * Plan(Llama8b("snapkv_h2o", 32768)).step.kv);
  EXPECT_EQ(three.step.weights, Plan(Llama8b("snapkv_h2o", 32768)).step.weights);
}

TEST(MemoryPlanTest, TheLongestContextFitsAndOneTokenMoreDoesNot) {
  for (const char* policy : {"full", "recall"}) {
    const Deployment deployment = Llama8b(policy, 32768);
    const int64_t longest = LongestContext(deployment, kNoScratch, 80 * kGib).value();
    EXPECT_GT(longest, 1024);
    EXPECT_LE(Plan(Llama8b(policy, longest)).device.total(), 80 * kGib);
    EXPECT_GT(Plan(Llama8b(policy, longest + 1)).device.total(), 80 * kGib);
  }
  EXPECT_EQ(LongestContext(Llama8b("full", 32768), kNoScratch, 10 * kGib).value(), 0);
}

TEST(MemoryPlanTest, WhatCannotBeIsRefusedByName) {
  struct Case {
    void (*change)(Deployment&);
    const char* error;
  };
  const Case cases[] = {
      {[](Deployment& d) { d.context_tokens = 1024; }, "context_tokens is 1024, want 1025"},
      {[](Deployment& d) { d.new_tokens = -1; }, "new_tokens is -1"},
      {[](Deployment& d) { d.num_sequences = 0; }, "num_sequences is 0"},
      {[](Deployment& d) { d.page_tokens = 0; }, "page_tokens is 0"},
      {[](Deployment& d) { d.max_step_tokens = 0; }, "max_step_tokens is 0"},
      {[](Deployment& d) { d.world_size = 3; },
       "3 ranks, want a divisor of the model's 32 query heads"},
      {[](Deployment& d) { d.policy.recall.sketch_channels = 12; }, "sketch_channels is 12"},
      {[](Deployment& d) { d.model.num_layers = 1 << 20; }, "of all sequences, in bytes, is"},
  };
  for (const Case& one : cases) {
    Deployment deployment = Llama8b("recall", 32768);
    one.change(deployment);
    EXPECT_THAT(std::string(PlanMemory(deployment, kNoScratch).status().message()),
                HasSubstr(one.error));
  }
}

}  // namespace
}  // namespace heavywater
