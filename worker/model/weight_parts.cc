#include "worker/model/weight_parts.h"

#include <utility>

#include "worker/model/message.h"

namespace heavywater {
namespace {

class PartList {
 public:
  PartList(const ModelConfig& config, const RankShard& shard) : config_(config), shard_(shard) {}

  std::vector<MatrixParts> Make(LlamaWeights& weights) && {
    Add(weights.embedding, {Vocabulary("token_embd.weight")});
    if (!config_.tied_embeddings) Add(weights.output, {Vocabulary("output.weight")});
    Add(weights.output_norm, {Vector("output_norm.weight", config_.hidden_size)});
    weights.layers.resize(static_cast<size_t>(config_.num_layers));
    for (size_t i = 0; i < weights.layers.size(); ++i) {
      AddLayer(Message("blk.", i, "."), weights.layers[i]);
    }
    return std::move(all_);
  }

 private:
  void Add(WeightMatrix& matrix, std::vector<WeightPart> parts) {
    all_.push_back({&matrix, std::move(parts)});
  }

  void AddLayer(const std::string& prefix, LlamaLayer& layer) {
    Add(layer.attn_norm, {Vector(prefix + "attn_norm.weight", config_.hidden_size)});
    Add(layer.qkv, Qkv(prefix, ".weight", WeightKind::kMatrix));
    if (config_.qkv_bias) Add(layer.qkv_bias, Qkv(prefix, ".bias", WeightKind::kStandingVector));
    if (config_.qk_norm) {
      Add(layer.q_norm, {Vector(prefix + "attn_q_norm.weight", config_.head_dim)});
      Add(layer.k_norm, {Vector(prefix + "attn_k_norm.weight", config_.head_dim)});
    }
    Add(layer.attn_output,
        {Columns(prefix + "attn_output.weight", int64_t{config_.num_query_heads} * config_.head_dim,
                 RowsOf(shard_.query_heads))});
    Add(layer.ffn_norm, {Vector(prefix + "ffn_norm.weight", config_.hidden_size)});
    Add(layer.gate_up,
        {FeedForward(prefix + "ffn_gate.weight"), FeedForward(prefix + "ffn_up.weight")});
    Add(layer.ffn_down, {Columns(prefix + "ffn_down.weight", config_.ffn_size, shard_.ffn)});
  }

  static WeightPart Rows(std::string tensor, int64_t rows, int64_t cols, const Range& taken) {
    return {.tensor = std::move(tensor),
            .rows = rows,
            .cols = cols,
            .taken_rows = taken,
            .taken_columns = {0, cols}};
  }
  static WeightPart Vector(std::string tensor, int64_t size) {
    WeightPart part = Rows(std::move(tensor), 1, size, {0, 1});
    part.kind = WeightKind::kVector;
    return part;
  }
  WeightPart Vocabulary(std::string tensor) const {
    return Rows(std::move(tensor), config_.vocab_size, config_.hidden_size, shard_.vocab);
  }
  WeightPart FeedForward(std::string tensor) const {
    return Rows(std::move(tensor), config_.ffn_size, config_.hidden_size, shard_.ffn);
  }
  WeightPart Columns(std::string tensor, int64_t cols, const Range& taken) const {
    WeightPart part = Rows(std::move(tensor), config_.hidden_size, cols, {0, config_.hidden_size});
    part.taken_columns = taken;
    return part;
  }

  Range RowsOf(const Range& heads) const {
    return {heads.begin * config_.head_dim, heads.size * config_.head_dim};
  }

  // The weights or, one element a row, the bias.
  std::vector<WeightPart> Qkv(const std::string& prefix, const std::string& suffix,
                              WeightKind kind) const {
    const int64_t cols = kind == WeightKind::kMatrix ? config_.hidden_size : 1;
    const int64_t kv_rows = int64_t{config_.num_kv_heads} * config_.head_dim;
    const int64_t q_rows = int64_t{config_.num_query_heads} * config_.head_dim;
    WeightPart q = Rows(prefix + "attn_q" + suffix, q_rows, cols, RowsOf(shard_.query_heads));
    WeightPart k = Rows(prefix + "attn_k" + suffix, kv_rows, cols, RowsOf(shard_.kv_heads));
    WeightPart v = Rows(prefix + "attn_v" + suffix, kv_rows, cols, RowsOf(shard_.kv_heads));
    if (config_.rotary_rows == RotaryRows::kNeighbours)
      q.head_rows = k.head_rows = config_.head_dim;
    q.kind = k.kind = v.kind = kind;
    return {std::move(q), std::move(k), std::move(v)};
  }

  const ModelConfig& config_;
  const RankShard& shard_;
  std::vector<MatrixParts> all_;
};

}  // namespace

int64_t WeightPart::TargetRow(int64_t index) const {
  if (head_rows == 0) return index;
  const int64_t in_head = index % head_rows;
  return index - in_head + in_head / 2 + in_head % 2 * (head_rows / 2);
}

int64_t MatrixParts::rows() const {
  int64_t rows = 0;
  for (const WeightPart& part : parts) rows += part.taken_rows.size;
  return rows;
}

std::vector<MatrixParts> PartsOf(const ModelConfig& config, const RankShard& shard,
                                 LlamaWeights& weights) {
  return PartList(config, shard).Make(weights);
}

}  // namespace heavywater
