// What every Llama-family runner does alike, whatever computes: cut rows into
// chunks, check, and sum over ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"
#include "worker/model/llama_weights.h"
#include "worker/model/model_config.h"
#include "worker/model/rank_shard.h"
#include "worker/rank/model.h"

namespace heavywater {

// Each rank computes its KV heads with the query heads that read them, a part of
// the feed-forward, and a part of the vocabulary (rank_shard.h). Collectives:
// one all-reduce in Embed, two in FinishLayer, one gather in ComputeLogits, for
// each chunk of max_batch_tokens (of kLogitsTokens in ComputeLogits).
//
// Used by one thread at a time. INVALID_ARGUMENT for a token outside the vocabulary;
// else the device's and the communicator's errors, after which the rows written are
// undefined.
class LlamaRunner : public Model {
 public:
  // Rows of logits computed at once: a vocabulary of 128,000 takes 32 MB, and the
  // gather of 3 ranks as much again.
  static constexpr int64_t kLogitsTokens = 64;

  const ModelConfig& config() const { return config_; }
  const RankShard& shard() const { return shard_; }
  int64_t weight_bytes() const { return weights_.memory.bytes(); }
  // Weights and workspace.
  virtual int64_t device_bytes() const = 0;

  // After the group has formed again: the same rank and size, the weights stay.
  void SetCommunicator(Communicator& comm);

  // How far each pair of a head turns from one position to the next, [head_dim / 2]
  // radians; the magnitude of a scaling is in every row, at position 0 too.
  std::vector<double> RopeFrequencies() const;

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

 protected:
  // Device memory through which ranks exchange a chunk.
  struct Exchange {
    DeviceSpan<float> partial;   // [max tokens][hidden], this rank's part of a sum
    DeviceSpan<float> logits;    // [logits tokens][max_vocab]
    DeviceSpan<float> gathered;  // [ranks][logits tokens][max_vocab]
  };

  // INVALID_ARGUMENT unless max_batch_tokens is one that a runner takes.
  static absl::Status CheckMaxBatch(int64_t max_batch_tokens);
  LlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights, Communicator& comm,
              int64_t max_batch_tokens);

  int64_t max_tokens() const { return max_tokens_; }
  int64_t max_logits_tokens() const;
  const LlamaWeights& weights() const { return weights_; }
  int64_t q_width() const { return shard_.query_heads.size * config_.head_dim; }
  int64_t kv_width() const { return shard_.kv_heads.size * config_.head_dim; }
  Exchange& exchange() { return exchange_; }  // set before the first call

  // The parts of a chunk, on this rank alone. hidden[i] of a token that another rank
  // has becomes 0.
  virtual absl::Status EmbedChunk(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                  Stream& stream) = 0;
  virtual absl::Status QkvChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                                std::span<const Position> positions, DeviceSpan<float> q,
                                DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) = 0;
  // exchange().partial = output projection of the rows of attention.
  virtual absl::Status AttentionChunk(const LlamaLayer& layer, DeviceSpan<const float> attention,
                                      int64_t tokens, Stream& stream) = 0;
  // exchange().partial = feed-forward of the normed rows of hidden.
  virtual absl::Status FeedForwardChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                                        int64_t tokens, Stream& stream) = 0;
  // hidden += the rows of exchange().partial.
  virtual absl::Status AddPartial(DeviceSpan<float> hidden, Stream& stream) = 0;
  // exchange().logits = [tokens][max_vocab], own range first in each row.
  virtual absl::Status LogitsChunk(DeviceSpan<const float> hidden, int64_t tokens,
                                   Stream& stream) = 0;
  // logits [tokens][vocab] from exchange().gathered, [ranks][tokens][max_vocab].
  virtual absl::Status PlaceLogits(int64_t tokens, DeviceSpan<float> logits, Stream& stream) = 0;

 private:
  absl::Status ReducePartial(DeviceSpan<float> hidden, Stream& stream);
  // `count` floats of every rank.
  absl::Status GatherLogits(int64_t count, Stream& stream);

  const ModelConfig config_;
  const RankShard shard_;
  const int64_t max_tokens_;
  const LlamaWeights weights_;
  Communicator* comm_;
  Exchange exchange_;
};

}  // namespace heavywater
