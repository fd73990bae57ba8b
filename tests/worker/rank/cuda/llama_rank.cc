#include "tests/worker/rank/cuda/llama_rank.h"

#include <utility>

#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/cache/device_bytes.h"
#include "worker/comm/staged/staged_communicator.h"
#include "worker/rank/prompt_pass.h"
#include "worker/rank/registered_tier.h"
#ifdef HEAVYWATER_CUDA_SHIM
#include "tests/worker/model/cuda/plain_matmul.h"
#endif

namespace heavywater {
namespace {

absl::StatusOr<std::unique_ptr<DeviceMatmul>> CreateMatmul() {
#ifdef HEAVYWATER_CUDA_SHIM
  return CreatePlainMatmul();
#else
  return CreateCublasMatmul();
#endif
}

}  // namespace

absl::StatusOr<std::unique_ptr<LlamaRank>> LlamaRank::Create(const GgufFile& file,
                                                             std::unique_ptr<Communicator> host,
                                                             int64_t host_tier_bytes) {
  std::unique_ptr<LlamaRank> rank(new LlamaRank);
  HW_ASSIGN_OR_RETURN(rank->backend_, CreateCudaBackend({}));
  if (host_tier_bytes > 0) {
    rank->tier_ = std::make_unique<LocalHostTier>(host_tier_bytes, RegisteredWith(*rank->backend_));
  }
  rank->communicator_ = std::make_unique<StagedCommunicator>(std::move(host), *rank->backend_);
  HW_ASSIGN_OR_RETURN(auto matmul, CreateMatmul());
  HW_ASSIGN_OR_RETURN(
      rank->runner_, CudaLlamaRunner::Create(file, *rank->communicator_, *rank->backend_,
                                             std::move(matmul), {.weights = WeightType::kFloat32}));
  const RankShard& shard = rank->runner_->shard();
  HW_ASSIGN_OR_RETURN(rank->cache_,
                      RankCache::Create({.shape = MakeKvShape(rank->runner_->config(), shard,
                                                              {.dtype = KvDtype::kFloat32}),
                                         .rank = shard.rank,
                                         .world_size = shard.size,
                                         .hidden_size = rank->runner_->hidden_size(),
                                         .vocab_size = rank->runner_->vocab_size()},
                                        *rank->backend_, rank->tier_.get()));
  return rank;
}

LlamaRank::~LlamaRank() = default;

absl::Status LlamaRank::OpenAndRunPrompt(SequenceId sequence, const SequenceOptions& options,
                                         const std::vector<int32_t>& tokens) {
  HW_RETURN_IF_ERROR(cache_->Open(sequence, options));
  HW_ASSIGN_OR_RETURN(const auto pass, PromptPass::Create(*cache_, *runner_, sequence, tokens));
  return pass->Run(*communicator_).status();
}

StepDescriptor LlamaRank::NextStep(SequenceId sequence, int32_t token) {
  const auto stats = cache_->Stats(sequence);
  StepDescriptor descriptor;
  descriptor.step = steps_++;
  descriptor.items = {{.sequence = sequence,
                       .first_position = stats.ok() ? static_cast<Position>(stats->tokens_seen) : 0,
                       .num_tokens = 1,
                       .plan_due = cache_->PlanDue(sequence, 1)}};
  descriptor.tokens = {token};
  return descriptor;
}

absl::StatusOr<std::vector<float>> LlamaRank::Logits(const DecodeStep& step) {
  const DeviceSpan<const float> on_device = step.logits(0);
  std::vector<float> logits(on_device.size());
  HW_RETURN_IF_ERROR(backend_->CopyToHost(std::as_writable_bytes(std::span(logits)),
                                          DeviceBytes(on_device), cache_->stream()));
  HW_RETURN_IF_ERROR(backend_->Synchronize(cache_->stream()));
  return logits;
}

}  // namespace heavywater
