// Llama-family models on the CPU, tensor parallel, in float32.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/model/gguf_file.h"
#include "worker/model/llama_weights.h"
#include "worker/model/matmul.h"
#include "worker/model/model_config.h"
#include "worker/model/rank_shard.h"
#include "worker/model/rope_angles.h"
#include "worker/rank/model.h"

namespace heavywater {

struct LlamaRunnerOptions {
  int num_threads = 1;         // of this rank, the caller's included (see Matmul)
  int max_batch_tokens = 512;  // rows computed at once; more are cut into chunks
};

// Each rank computes its KV heads with the query heads that read them, a part of
// the feed-forward, and a part of the vocabulary (rank_shard.h). Collectives:
// one all-reduce in Embed, two in FinishLayer, one gather in ComputeLogits, for
// each chunk of max_batch_tokens (of 64 tokens in ComputeLogits).
//
// The backend gives the memory, which must be CPU memory: this runner looks
// inside device buffers, as a part of the CPU's implementation, and finishes
// before it returns. Used by one thread at a time. INVALID_ARGUMENT for a token
// outside the vocabulary; else the communicator's errors, after which the rows
// written are undefined.
class CpuLlamaRunner final : public Model {
 public:
  // Loads the shard of rank comm.rank() of comm.size(); `file` is not used
  // afterwards. `comm` and `backend` must outlive the runner. Errors as
  // ReadModelConfig(), MakeRankShard() and LoadLlamaWeights().
  static absl::StatusOr<std::unique_ptr<CpuLlamaRunner>> Create(const GgufFile& file,
                                                                Communicator& comm,
                                                                Backend& backend,
                                                                const LlamaRunnerOptions& options);

  const ModelConfig& config() const { return config_; }
  const RankShard& shard() const { return shard_; }
  int64_t weight_bytes() const { return weights_.memory.bytes(); }
  // Weights and workspace.
  int64_t device_bytes() const;

  // After the group has formed again: the same rank and size, the weights stay.
  void SetCommunicator(Communicator& comm);

  int hidden_size() const override { return config_.hidden_size; }
  int vocab_size() const override { return config_.vocab_size; }
  absl::Status Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                     Stream& stream) override;
  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;
  absl::Status FinishLayer(int layer, DeviceSpan<const float> attention, DeviceSpan<float> hidden,
                           Stream& stream) override;
  absl::Status ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                             Stream& stream) override;

 private:
  // Rows for one chunk, in `workspace_`.
  struct Workspace {
    float* normed = nullptr;     // [padded][hidden]
    float* qkv = nullptr;        // [padded][qkv rows]
    float* attention = nullptr;  // [padded][query heads * head_dim]
    float* gate_up = nullptr;    // [padded][2 * ffn]
    float* inner = nullptr;      // [padded][ffn]
    float* partial = nullptr;    // [padded][hidden], this rank's part of a sum
    float* logits = nullptr;     // [padded logits rows][max_vocab]
    float* gathered = nullptr;   // [ranks][logits rows][max_vocab]
  };

  CpuLlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights, Communicator& comm,
                 const LlamaRunnerOptions& options);

  absl::Status AllocateWorkspace(Backend& backend);
  // Gives the workspace's parts addresses from `memory`; returns the floats used.
  int64_t LayOutWorkspace(float* memory);

  absl::Status QkvChunk(const LlamaLayer& layer, const float* hidden,
                        std::span<const Position> positions, float* q, float* k, float* v);
  absl::Status AttentionChunk(const LlamaLayer& layer, const float* attention, int64_t tokens,
                              float* hidden, Stream& stream);
  absl::Status FeedForwardChunk(const LlamaLayer& layer, int64_t tokens, float* hidden,
                                Stream& stream);
  absl::Status LogitsChunk(const float* hidden, int64_t tokens, float* logits, Stream& stream);

  // normed = RMS norm of the rows of hidden.
  void Normalise(const float* hidden, int64_t tokens, const WeightMatrix& weight);
  // hidden += the sum of all ranks' partial.
  absl::Status AddPartials(int64_t tokens, float* hidden, Stream& stream);
  absl::Status Multiply(const WeightMatrix& weights, const float* x, int64_t tokens, float* out,
                        int64_t out_stride);

  const ModelConfig config_;
  const RankShard shard_;
  const int64_t max_tokens_;
  LlamaWeights weights_;
  Communicator* comm_;
  RopeAngles angles_;
  std::unique_ptr<Matmul> matmul_;
  DeviceBuffer workspace_memory_;
  Workspace workspace_;
};

}  // namespace heavywater
