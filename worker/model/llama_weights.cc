#include "worker/model/llama_weights.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/dequantize.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr int64_t kAlignFloats = 16;  // a cache line

// Hands out the buffer's memory piece by piece. Without a buffer it only counts,
// so that one description of the layout serves both.
class Arena {
 public:
  void SetMemory(float* memory) {
    memory_ = memory;
    used_ = 0;
  }
  int64_t used() const { return used_; }

  WeightMatrix Take(int64_t rows, int64_t cols) {
    const WeightMatrix matrix{memory_ == nullptr ? nullptr : memory_ + used_, rows, cols};
    used_ += (rows * cols + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return matrix;
  }

 private:
  float* memory_ = nullptr;
  int64_t used_ = 0;
};

void LayOut(const ModelConfig& config, const RankShard& shard, Arena& arena,
            LlamaWeights& weights) {
  const int64_t hidden = config.hidden_size;
  const int64_t head_dim = config.head_dim;
  weights.embedding = arena.Take(shard.vocab.size, hidden);
  weights.output =
      config.tied_embeddings ? weights.embedding : arena.Take(shard.vocab.size, hidden);
  weights.output_norm = arena.Take(1, hidden);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (LlamaLayer& layer : weights.layers) {
    layer.attn_norm = arena.Take(1, hidden);
    layer.qkv = arena.Take((shard.query_heads.size + 2 * shard.kv_heads.size) * head_dim, hidden);
    layer.attn_output = arena.Take(hidden, shard.query_heads.size * head_dim);
    layer.ffn_norm = arena.Take(1, hidden);
    layer.gate_up = arena.Take(2 * shard.ffn.size, hidden);
    layer.ffn_down = arena.Take(hidden, shard.ffn.size);
  }
}

Range HeadRows(const Range& heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.size * head_dim};
}

// Fills the laid-out matrices from the file.
class Loader {
 public:
  Loader(const GgufFile& file, const ModelConfig& config, const RankShard& shard)
      : file_(file), config_(config), shard_(shard) {}

  absl::Status LoadAll(LlamaWeights& weights) {
    const int64_t hidden = config_.hidden_size;
    const int64_t vocab = config_.vocab_size;
    HW_RETURN_IF_ERROR(LoadRows("token_embd", vocab, hidden, shard_.vocab, weights.embedding, 0));
    if (!config_.tied_embeddings) {
      HW_RETURN_IF_ERROR(LoadRows("output", vocab, hidden, shard_.vocab, weights.output, 0));
    }
    HW_RETURN_IF_ERROR(LoadVector("output_norm", weights.output_norm));
    HW_RETURN_IF_ERROR(LoadRopeFactors(weights));
    for (size_t i = 0; i < weights.layers.size(); ++i) {
      HW_RETURN_IF_ERROR(LoadLayer(Message("blk.", i, "."), weights.layers[i]));
    }
    return CheckNothingIsLeft();
  }

 private:
  absl::Status LoadLayer(const std::string& prefix, const LlamaLayer& layer) {
    const int64_t hidden = config_.hidden_size;
    const int64_t ffn = config_.ffn_size;
    const int64_t head_dim = config_.head_dim;
    const int64_t q_rows = config_.num_query_heads * head_dim;
    const int64_t kv_rows = config_.num_kv_heads * head_dim;
    const Range q = HeadRows(shard_.query_heads, head_dim);
    const Range kv = HeadRows(shard_.kv_heads, head_dim);
    HW_RETURN_IF_ERROR(LoadVector(prefix + "attn_norm", layer.attn_norm));
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_q", q_rows, q, layer.qkv, 0));
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_k", kv_rows, kv, layer.qkv, q.size));
    HW_RETURN_IF_ERROR(
        LoadRows(prefix + "attn_v", kv_rows, hidden, kv, layer.qkv, q.size + kv.size));
    HW_RETURN_IF_ERROR(LoadColumns(prefix + "attn_output", q_rows, q, layer.attn_output));
    HW_RETURN_IF_ERROR(LoadVector(prefix + "ffn_norm", layer.ffn_norm));
    HW_RETURN_IF_ERROR(LoadRows(prefix + "ffn_gate", ffn, hidden, shard_.ffn, layer.gate_up, 0));
    HW_RETURN_IF_ERROR(
        LoadRows(prefix + "ffn_up", ffn, hidden, shard_.ffn, layer.gate_up, shard_.ffn.size));
    return LoadColumns(prefix + "ffn_down", ffn, shard_.ffn, layer.ffn_down);
  }

  // The tensor `name`.weight, which must be [rows][cols].
  absl::StatusOr<GgufTensor> Find(const std::string& name, int64_t rows, int64_t cols) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, file_.GetTensor(name + ".weight"));
    used_.insert(tensor.name);
    if (tensor.rows != rows || tensor.row_elements != cols) {
      return absl::InvalidArgumentError(Message("tensor '", tensor.name, "' is ", tensor.rows,
                                                " x ", tensor.row_elements, ", want ", rows, " x ",
                                                cols));
    }
    return tensor;
  }

  static float* Row(const WeightMatrix& matrix, int64_t row) {
    return const_cast<float*>(matrix.row(row));  // written here, read only from then on
  }

  absl::Status LoadVector(const std::string& name, const WeightMatrix& to) {
    return LoadRows(name, 1, to.cols, {0, 1}, to, 0);
  }

  // Rows `range` of the tensor to the rows of `to` from `to_row`.
  absl::Status LoadRows(const std::string& name, int64_t rows, int64_t cols, const Range& range,
                        const WeightMatrix& to, int64_t to_row) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, cols));
    DequantizeRows(tensor, range.begin, range.size,
                   {Row(to, to_row), static_cast<size_t>(range.size * cols)});
    return absl::OkStatus();
  }

  // GGUF stores rows 2i and 2i + 1 of a head where its rotation pairs rows i and
  // i + half; here they return to halves.
  absl::Status LoadRotated(const std::string& name, int64_t rows, const Range& range,
                           const WeightMatrix& to, int64_t to_row) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, to.cols));
    const int64_t half = config_.head_dim / 2;
    for (int64_t row = 0; row < range.size; ++row) {
      const int64_t in_head = row % config_.head_dim;
      const int64_t halves = row - in_head + in_head / 2 + (in_head % 2) * half;
      DequantizeRows(tensor, range.begin + row, 1,
                     {Row(to, to_row + halves), static_cast<size_t>(to.cols)});
    }
    return absl::OkStatus();
  }

  // Columns `range` of all rows.
  absl::Status LoadColumns(const std::string& name, int64_t cols, const Range& range,
                           const WeightMatrix& to) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, to.rows, cols));
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = 0; r < to.rows; ++r) {
      DequantizeRows(tensor, r, 1, row);
      std::copy_n(row.begin() + range.begin, range.size, Row(to, r));
    }
    return absl::OkStatus();
  }

  absl::Status LoadRopeFactors(LlamaWeights& weights) {
    if (file_.FindTensor("rope_freqs.weight") == nullptr) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find("rope_freqs", 1, config_.head_dim / 2));
    weights.rope_factors.resize(static_cast<size_t>(tensor.row_elements));
    DequantizeRows(tensor, 0, 1, weights.rope_factors);
    return absl::OkStatus();
  }

  // A tensor that nothing read would change the output if it were applied.
  absl::Status CheckNothingIsLeft() const {
    for (const std::string_view name : file_.TensorNames()) {
      if (used_.contains(name)) continue;
      return absl::UnimplementedError(
          Message("tensor '", name, "' is not a part of the models this runner computes"));
    }
    return absl::OkStatus();
  }

  const GgufFile& file_;
  const ModelConfig& config_;
  const RankShard& shard_;
  absl::flat_hash_set<std::string_view> used_;
};

}  // namespace

WeightCounts CountWeights(const ModelConfig& config, const RankShard& shard) {
  LlamaWeights weights;
  Arena arena;
  LayOut(config, shard, arena, weights);
  const int64_t embedding = weights.embedding.rows * weights.embedding.cols;
  return {.all = arena.used(),
          .read_by_step = arena.used() - (config.tied_embeddings ? 0 : embedding)};
}

absl::StatusOr<LlamaWeights> LoadLlamaWeights(const GgufFile& file, const ModelConfig& config,
                                              const RankShard& shard, Backend& backend) {
  LlamaWeights weights;
  Arena arena;
  LayOut(config, shard, arena, weights);
  HW_ASSIGN_OR_RETURN(weights.memory,
                      backend.Allocate(arena.used() * static_cast<int64_t>(sizeof(float))));
  arena.SetMemory(weights.memory.As<float>().device_address());
  LayOut(config, shard, arena, weights);
  HW_RETURN_IF_ERROR(Loader(file, config, shard).LoadAll(weights));
  return weights;
}

}  // namespace heavywater
