// A whole rank's steady decode step, from the token's embedding to what it gives to the
// reduce of scores, captured as a CUDA graph: nothing in it allocates, waits, or reads
// what the device has written (a capture refuses all three), and launching the graph does
// what the step does. Needs a GPU.
#include <cuda_runtime.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_llama.h"
#include "tests/worker/rank/cuda/llama_rank.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {
namespace {

constexpr int kPromptTokens = 90;
constexpr int kWarmSteps = 5;  // one plan at least: memory then has the size it keeps
constexpr int kCapturedSteps = 6;
constexpr TinyLlamaShape kShape = {.layers = 2,
                                   .hidden = 128,
                                   .query_heads = 8,
                                   .kv_heads = 2,
                                   .head_dim = 32,
                                   .ffn = 256,
                                   .vocab = 500};

int32_t Token(int position) { return (position * 37 + position / 7 * 11) % kShape.vocab; }

SequenceOptions Sequence(int plan_interval) {
  SequenceOptions sequence;
  sequence.policy.policy = Policy::kSnapKvH2o;
  sequence.policy.heavy_tokens = 24;
  sequence.policy.recent_tokens = 8;
  sequence.policy.plan_interval_steps = plan_interval;
  sequence.policy.decay = 0.9;
  sequence.prompt_tokens = kPromptTokens;
  sequence.max_tokens = kPromptTokens + kWarmSteps + kCapturedSteps;
  return sequence;
}

// A rank after its prompt and the first steps.
class WarmRank {
 public:
  WarmRank(const GgufFile& file, int plan_interval)
      : rank_(LlamaRank::Create(file, std::move(CreateLocalGroup(1, absl::Seconds(20)).front()),
                                int64_t{1} << 28)
                  .value()),
        step_(rank_->cache(), rank_->runner()) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < kPromptTokens; ++i) prompt.push_back(Token(i));
    EXPECT_TRUE(rank_->OpenAndRunPrompt(1, Sequence(plan_interval), prompt).ok());
    for (int i = 0; i < kWarmSteps; ++i) {
      EXPECT_TRUE(step_.Run(Next(), rank_->communicator()).ok());
    }
  }

  StepDescriptor Next() { return rank_->NextStep(1, Token(seen_++)); }
  absl::Status Before() { return step_.Before(Next()); }
  absl::Status Synchronize() { return rank_->backend().Synchronize(rank_->cache().stream()); }
  // As Before(), recorded, and then launched.
  absl::Status CaptureAndLaunch() {
    auto* const stream = static_cast<cudaStream_t>(rank_->cache().stream().handle);
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const absl::Status recorded = Before();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    if (!recorded.ok()) return recorded;
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    const absl::Status done = Synchronize();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return done;
  }
  // The reduce of one rank's scores changes nothing.
  absl::Status After() { return step_.After(); }

  std::vector<float> Logits() { return rank_->Logits(step_).value(); }
  std::vector<ResidentSet> Sets() {
    return rank_->cache().Report(1, /*with_sets=*/true).value().sets;
  }
  // Of layer and KV head, as the host tier has them.
  std::vector<std::byte> Page(int layer, int kv_head) {
    const KvShape& shape = rank_->cache().options().shape;
    const std::byte* page = rank_->tier()->Page(1, layer, kv_head, 0);
    return {page, page + shape.page_tokens * shape.row_bytes()};
  }

 private:
  std::unique_ptr<LlamaRank> rank_;
  DecodeStep step_;
  int seen_ = kPromptTokens;
};

void ExpectSameSets(const std::vector<ResidentSet>& got, const std::vector<ResidentSet>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].positions, want[i].positions) << "set " << i;
    EXPECT_EQ(got[i].scores, want[i].scores) << "set " << i;
  }
}

class DeviceStepGraphTest : public testing::TestWithParam<int> {};

TEST_P(DeviceStepGraphTest, ARanksSteadyStepIsCapturedWholeAndItsGraphDoesTheSame) {
  if (const auto backend = CreateCudaBackend({}); !backend.ok()) GTEST_SKIP() << backend.status();
  const TinyLlama llama(kShape, 1);
  const TemporaryFile path(llama.File());
  const std::unique_ptr<GgufFile> file = GgufFile::Open(path.path()).value();
  WarmRank called(*file, GetParam());
  WarmRank captured(*file, GetParam());
  const std::vector<std::byte> page = captured.Page(0, 0);
  for (int i = 0; i < kCapturedSteps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    ASSERT_TRUE(called.Before().ok());
    const absl::Status status = captured.CaptureAndLaunch();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(called.After().ok());
    ASSERT_TRUE(captured.After().ok());
    EXPECT_EQ(captured.Logits(), called.Logits());
    ExpectSameSets(captured.Sets(), called.Sets());
  }
  for (int layer = 0; layer < kShape.layers; ++layer) {
    for (int kv_head = 0; kv_head < kShape.kv_heads; ++kv_head) {
      EXPECT_EQ(captured.Page(layer, kv_head), called.Page(layer, kv_head));
    }
  }
  EXPECT_NE(captured.Page(0, 0), page) << "write-through is part of the step";
}

// With a plan at every step, and at every fourth.
INSTANTIATE_TEST_SUITE_P(Intervals, DeviceStepGraphTest, testing::Values(1, 4));

}  // namespace
}  // namespace heavywater
