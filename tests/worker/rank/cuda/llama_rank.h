// One rank of a Llama on a GPU: runner, cache and communicator, as a worker has them.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_service/tier/local_host_tier.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/model/cuda/cuda_llama_runner.h"
#include "worker/model/gguf_file.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

class LlamaRank {
 public:
  // Weights and KV in float32, so that the order in which ranks' parts are summed stays
  // small. Ranks reduce through the host, over `host`. With `host_tier_bytes` of memory,
  // which is registered with the device, it writes its pages through.
  static absl::StatusOr<std::unique_ptr<LlamaRank>> Create(const GgufFile& file,
                                                           std::unique_ptr<Communicator> host,
                                                           int64_t host_tier_bytes = 0);
  ~LlamaRank();
  LlamaRank(const LlamaRank&) = delete;
  LlamaRank& operator=(const LlamaRank&) = delete;

  Backend& backend() { return *backend_; }
  Communicator& communicator() { return *communicator_; }
  CudaLlamaRunner& runner() { return *runner_; }
  RankCache& cache() { return *cache_; }
  LocalHostTier* tier() { return tier_.get(); }

  absl::Status OpenAndRunPrompt(SequenceId sequence, const SequenceOptions& options,
                                const std::vector<int32_t>& tokens);
  // Of the next token of a sequence.
  StepDescriptor NextStep(SequenceId sequence, int32_t token);
  absl::StatusOr<std::vector<float>> Logits(const DecodeStep& step);

 private:
  LlamaRank() = default;

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LocalHostTier> tier_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<CudaLlamaRunner> runner_;
  std::unique_ptr<RankCache> cache_;
  uint64_t steps_ = 0;
};

}  // namespace heavywater
