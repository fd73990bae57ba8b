// A Llama of random weights on a GPU, whole: its ranks share the device, reduce
// through the host, and keep what one rank keeps. Needs a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/cache/device_bytes.h"
#include "worker/comm/communicator.h"
#include "worker/comm/staged/staged_communicator.h"
#include "worker/model/cuda/cuda_llama_runner.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/prompt_pass.h"
#include "worker/rank/rank_cache.h"
#ifdef HEAVYWATER_CUDA_SHIM
#include "tests/worker/model/cuda/plain_matmul.h"
#endif

namespace heavywater {
namespace {

#ifdef HEAVYWATER_CUDA_SHIM
constexpr int kPromptTokens = 160;
constexpr int kSteps = 4;
#else
constexpr int kPromptTokens = 600;
constexpr int kSteps = 16;
#endif
constexpr int kHeavyTokens = kPromptTokens / 6;
constexpr int kRecentTokens = kPromptTokens / 15;
constexpr TinyLlamaShape kShape = {.layers = 3,
                                   .hidden = 256,
                                   .query_heads = 16,
                                   .kv_heads = 4,
                                   .head_dim = 64,
                                   .ffn = 512,
                                   .vocab = 1000};

absl::StatusOr<std::unique_ptr<DeviceMatmul>> CreateMatmul() {
#ifdef HEAVYWATER_CUDA_SHIM
  return CreatePlainMatmul();
#else
  return CreateCublasMatmul();
#endif
}

std::vector<int32_t> Tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 7 * 11) % kShape.vocab);
  return tokens;
}

SequenceOptions Sequence() {
  SequenceOptions sequence;
  sequence.policy.policy = Policy::kSnapKvH2o;
  sequence.policy.heavy_tokens = kHeavyTokens;
  sequence.policy.recent_tokens = kRecentTokens;
  sequence.prompt_tokens = kPromptTokens;
  sequence.max_tokens = kPromptTokens + kSteps;
  return sequence;
}

// What a rank leaves.
struct Outcome {
  std::vector<ResidentSet> at_prompts_end;
  std::vector<ResidentSet> at_the_end;
  std::vector<float> logits;  // of the last step
};

class LlamaRank {
 public:
  static absl::StatusOr<std::unique_ptr<LlamaRank>> Create(const GgufFile& file,
                                                           std::unique_ptr<Communicator> host) {
    auto rank = std::make_unique<LlamaRank>();
    HW_ASSIGN_OR_RETURN(rank->backend_, CreateCudaBackend({}));
    rank->comm_ = std::make_unique<StagedCommunicator>(std::move(host), *rank->backend_);
    HW_ASSIGN_OR_RETURN(auto matmul, CreateMatmul());
    // In float32, so that the order in which ranks' parts are summed stays small.
    HW_ASSIGN_OR_RETURN(rank->runner_, CudaLlamaRunner::Create(file, *rank->comm_, *rank->backend_,
                                                               std::move(matmul),
                                                               {.weights = WeightType::kFloat32}));
    const RankShard& shard = rank->runner_->shard();
    HW_ASSIGN_OR_RETURN(rank->cache_,
                        RankCache::Create({.shape = MakeKvShape(rank->runner_->config(), shard,
                                                                {.dtype = KvDtype::kFloat32}),
                                           .rank = shard.rank,
                                           .world_size = shard.size,
                                           .hidden_size = rank->runner_->hidden_size(),
                                           .vocab_size = rank->runner_->vocab_size()},
                                          *rank->backend_, nullptr));
    return rank;
  }

  absl::StatusOr<Outcome> Run() {
    Outcome outcome;
    const std::vector<int32_t> tokens = Tokens(kPromptTokens + kSteps);
    HW_RETURN_IF_ERROR(cache_->Open(1, Sequence()));
    {
      HW_ASSIGN_OR_RETURN(const auto pass,
                          PromptPass::Create(*cache_, *runner_, 1,
                                             {tokens.begin(), tokens.begin() + kPromptTokens}));
      HW_RETURN_IF_ERROR(pass->Run(*comm_).status());
    }
    HW_ASSIGN_OR_RETURN(PlanReport report, cache_->Report(1, /*with_sets=*/true));
    outcome.at_prompts_end = std::move(report.sets);
    DecodeStep step(*cache_, *runner_);
    for (int i = 0; i < kSteps; ++i) HW_RETURN_IF_ERROR(Step(step, tokens[kPromptTokens + i], i));
    HW_ASSIGN_OR_RETURN(report, cache_->Report(1, /*with_sets=*/true));
    outcome.at_the_end = std::move(report.sets);
    const DeviceSpan<const float> logits = step.logits(0);
    outcome.logits.resize(logits.size());
    HW_RETURN_IF_ERROR(backend_->CopyToHost(std::as_writable_bytes(std::span(outcome.logits)),
                                            DeviceBytes(logits), cache_->stream()));
    HW_RETURN_IF_ERROR(backend_->Synchronize(cache_->stream()));
    return outcome;
  }

 private:
  absl::Status Step(DecodeStep& step, int32_t token, int index) {
    StepDescriptor descriptor;
    descriptor.step = static_cast<uint64_t>(index);
    descriptor.items = {{.sequence = 1,
                         .first_position = static_cast<Position>(kPromptTokens + index),
                         .num_tokens = 1,
                         .plan_due = cache_->PlanDue(1, 1)}};
    descriptor.tokens = {token};
    HW_RETURN_IF_ERROR(step.Run(descriptor, *comm_));
    return step.item_status()[0];
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<CudaLlamaRunner> runner_;
  std::unique_ptr<RankCache> cache_;
};

// Each rank on its own thread; rank 0's outcome.
absl::StatusOr<Outcome> RunRanks(const GgufFile& file, int size) {
  auto hosts = CreateLocalGroup(size, absl::Seconds(20));
  std::vector<absl::StatusOr<Outcome>> outcomes(size, absl::UnknownError("not run"));
  std::vector<std::unique_ptr<LlamaRank>> ranks(size);  // none leaves before all are done
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto created = LlamaRank::Create(file, std::move(hosts[rank]));
      if (!created.ok()) {
        outcomes[rank] = created.status();
        return;
      }
      ranks[rank] = *std::move(created);
      outcomes[rank] = ranks[rank]->Run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string errors;
  for (int rank = 0; rank < size; ++rank) {
    if (outcomes[rank].ok()) continue;
    errors += absl::StrCat("rank ", rank, ": ", outcomes[rank].status().ToString(), "; ");
  }
  if (!errors.empty()) return absl::UnknownError(errors);
  return outcomes[0];
}

// Positions of `want` that `got` lacks, over all layers; -1 when sets are not alike.
int64_t Missing(const std::vector<ResidentSet>& got, const std::vector<ResidentSet>& want) {
  if (got.size() != want.size()) return -1;
  int64_t missing = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const std::set<Position> have(got[i].positions.begin(), got[i].positions.end());
    if (have.size() != want[i].positions.size()) return -1;
    for (const Position position : want[i].positions) missing += have.contains(position) ? 0 : 1;
  }
  return missing;
}

double LargestError(const std::vector<float>& got, const std::vector<float>& want) {
  double scale = 0;
  double error = got.size() == want.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    scale = std::max<double>(scale, std::abs(want[i]));
    // NaN must not pass as no difference.
    error = got[i] == got[i] ? std::max<double>(error, std::abs(got[i] - want[i])) : INFINITY;
  }
  return error / scale;
}

TEST(DeviceLlamaTest, RanksThatShareAGpuKeepWhatOneRankKeeps) {
  if (const auto backend = CreateCudaBackend({}); !backend.ok()) GTEST_SKIP() << backend.status();
  const TinyLlama llama(kShape, 1);
  const TemporaryFile path(llama.File());
  const std::unique_ptr<GgufFile> file = GgufFile::Open(path.path()).value();
  const auto alone = RunRanks(*file, 1);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const int64_t slots = kShape.layers * (kHeavyTokens + kRecentTokens);
  for (const int size : {2, 4}) {
    const auto outcome = RunRanks(*file, size);
    ASSERT_TRUE(outcome.ok()) << size << " ranks: " << outcome.status();
    const int64_t at_first = Missing(outcome->at_prompts_end, alone->at_prompts_end);
    const int64_t at_last = Missing(outcome->at_the_end, alone->at_the_end);
    std::printf("%d ranks: %ld of %ld slots differ at the prompt's end, %ld after %d steps\n", size,
                static_cast<long>(at_first), static_cast<long>(slots), static_cast<long>(at_last),
                kSteps);
    // Sums in another order: near the cut a position may differ, and with it a little
    // of what follows.
    EXPECT_GE(at_first, 0);
    EXPECT_LE(at_first * 200, slots);
    EXPECT_GE(at_last, 0);
    EXPECT_LE(at_last * 50, slots);
    EXPECT_LT(LargestError(outcome->logits, alone->logits), 0.01);
  }
}

}  // namespace
}  // namespace heavywater
