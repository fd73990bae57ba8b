// Llama-family models on the CPU, tensor parallel: in float32, with weights as the file
// has them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/model/llama_runner.h"
#include "worker/model/llama_weights.h"
#include "worker/model/matmul.h"
#include "worker/model/model_config.h"
#include "worker/model/model_file.h"
#include "worker/model/rank_shard.h"
#include "worker/model/rope_angles.h"

namespace heavywater {

struct LlamaRunnerOptions {
  int num_threads = 1;         // of this rank, the caller's included (see Matmul)
  int max_batch_tokens = 512;  // rows computed at once; more are cut into chunks
};

// The backend gives the memory, which must be CPU memory: this runner looks
// inside device buffers, as a part of the CPU's implementation, and finishes
// before it returns.
class CpuLlamaRunner final : public LlamaRunner {
 public:
  // Loads the shard of rank comm.rank() of comm.size(); `file` is not used
  // afterwards. `comm` and `backend` must outlive the runner. Errors as
  // ModelFile::ReadConfig(), MakeRankShard() and LoadLlamaWeights().
  static absl::StatusOr<std::unique_ptr<CpuLlamaRunner>> Create(const ModelFile& file,
                                                                Communicator& comm,
                                                                Backend& backend,
                                                                const LlamaRunnerOptions& options);

  int64_t device_bytes() const override;

 protected:
  absl::Status EmbedChunk(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                          Stream& stream) override;
  absl::Status QkvChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                        std::span<const Position> positions, DeviceSpan<float> q,
                        DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;
  absl::Status AttentionChunk(const LlamaLayer& layer, DeviceSpan<const float> attention,
                              int64_t tokens, Stream& stream) override;
  absl::Status FeedForwardChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                                int64_t tokens, Stream& stream) override;
  absl::Status AddPartial(DeviceSpan<float> hidden, Stream& stream) override;
  absl::Status LogitsChunk(DeviceSpan<const float> hidden, int64_t tokens, Stream& stream) override;
  absl::Status PlaceLogits(int64_t tokens, DeviceSpan<float> logits, Stream& stream) override;

 private:
  // Rows for one chunk, in `workspace_`.
  struct Workspace {
    float* normed = nullptr;     // [padded][hidden]
    float* qkv = nullptr;        // [padded][qkv rows]
    float* attention = nullptr;  // [padded][query heads * head_dim]
    float* gate_up = nullptr;    // [padded][2 * ffn]
    float* inner = nullptr;      // [padded][ffn]
    float* partial = nullptr;    // [padded][hidden]
    float* logits = nullptr;     // [padded logits rows][max_vocab]
    float* gathered = nullptr;   // [ranks][logits rows][max_vocab]
  };

  CpuLlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights, Communicator& comm,
                 const LlamaRunnerOptions& options);

  absl::Status AllocateWorkspace(Backend& backend);
  // What the matrices' products need beside it.
  absl::Status ReserveMatrices();
  // Gives the workspace's parts addresses from `memory`; returns the floats used.
  int64_t LayOutWorkspace(float* memory);

  // normed = RMS norm of the rows of hidden.
  void Normalise(const float* hidden, int64_t tokens, const WeightMatrix& weight);
  // What an architecture does to rows of Q, K and V before RoPE, if anything.
  void PrepareQkv(const LlamaLayer& layer, float* row) const;
  absl::Status Multiply(const WeightMatrix& weights, const float* x, int64_t tokens, float* out,
                        int64_t out_stride);

  RopeAngles angles_;
  std::unique_ptr<Matmul> matmul_;
  DeviceBuffer workspace_memory_;
  Workspace workspace_;
};

}  // namespace heavywater
