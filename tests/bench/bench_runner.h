// One rank of a model as a worker runs it, without the worker: the built-in runner, the
// bounded cache, host pages in this process; prompts and steps one after the other.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/local_host_tier.h"
#include "worker/comm/communicator.h"
#include "worker/model/cpu_llama_runner.h"
#include "worker/model/model_file.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// One thread: that of the rank.
class BenchRunner {
 public:
  // Of rank comm.rank(); `comm` outlives it.
  static absl::StatusOr<std::unique_ptr<BenchRunner>> Create(const ModelFile& file,
                                                             Communicator& comm, KvDtype dtype);
  ~BenchRunner();

  // Runs the prompt and chooses the first token.
  absl::Status Open(SequenceId sequence, const PolicyOptions& policy,
                    const std::vector<int32_t>& prompt, int64_t new_tokens);
  // One token more of every open sequence, the most probable; reports due are made, and
  // dropped.
  absl::Status Step();
  absl::Status Close(SequenceId sequence);

  // Chosen so far.
  const std::vector<int32_t>& ids(SequenceId sequence) const { return open_.at(sequence).ids; }
  absl::StatusOr<SequenceStats> Stats(SequenceId sequence) const { return cache_->Stats(sequence); }
  // INTERNAL unless the sequence holds what its policy may, and nothing is lost.
  absl::Status CheckSets(SequenceId sequence) const;
  const ModelConfig& config() const { return model_->config(); }

 private:
  struct Sequence {
    int64_t plan_interval = 1;
    int64_t tokens_seen = 0;
    std::vector<int32_t> ids;
  };

  explicit BenchRunner(Communicator& comm) : comm_(comm) {}
  absl::Status Choose(DeviceSpan<const float> logits, Sequence& sequence);
  StepDescriptor NextStep();
  absl::Status Report(SequenceId sequence);

  Communicator& comm_;
  LocalHostTier tier_{int64_t{4} << 30};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<CpuLlamaRunner> model_;
  std::unique_ptr<RankCache> cache_;
  std::unique_ptr<DecodeStep> step_;
  uint64_t num_steps_ = 0;
  std::map<SequenceId, Sequence> open_;
};

// What tests/reference computed with the embedded model, independently: prompts, and the
// most probable tokens after them (full cache in float32).
struct ExpectedText {
  std::string name;
  std::vector<int32_t> prompt;
  std::vector<int32_t> ids;
};
absl::StatusOr<std::vector<ExpectedText>> ReadExpectedTexts();

// INTERNAL unless the full cache in float32 yields the expected tokens, of all texts or of
// the first. OK without a check where the model is another one than the embedded.
absl::Status CheckExpectedIds(const ModelFile& file, bool all);

}  // namespace heavywater
