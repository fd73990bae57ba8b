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
    const WeightMatrix matrix{.data = memory_ == nullptr ? nullptr : memory_ + used_,
                              .offset = used_ * static_cast<int64_t>(sizeof(float)),
                              .rows = rows,
                              .cols = cols};
    used_ += (rows * cols + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return matrix;
  }

 private:
  float* memory_ = nullptr;
  int64_t used_ = 0;
};

// Only counts, in bytes, for elements of any size.
class ByteArena {
 public:
  explicit ByteArena(const WeightFormat& format) : format_(format) {}
  int64_t used() const { return used_; }

  WeightMatrix Take(int64_t rows, int64_t cols) {
    const WeightMatrix matrix{.offset = used_, .rows = rows, .cols = cols};
    const int64_t bytes = rows * cols * (rows == 1 ? format_.vector_bytes : format_.matrix_bytes);
    used_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return matrix;
  }

 private:
  static constexpr int64_t kAlignBytes = 256;  // what GPUs load best
  const WeightFormat format_;
  int64_t used_ = 0;
};

template <class AnyArena>
void LayOut(const ModelConfig& config, const RankShard& shard, AnyArena& arena,
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

// Matrices that already have memory.
class InPlace final : public WeightSink {
 public:
  float* Begin(const WeightMatrix& matrix) override {
    return const_cast<float*>(matrix.data);  // written here, read only from then on
  }
  absl::Status Finish(const WeightMatrix& matrix) override { return absl::OkStatus(); }
};

// Fills the laid-out matrices from the file.
class Loader {
 public:
  Loader(const GgufFile& file, const ModelConfig& config, const RankShard& shard, WeightSink& sink)
      : file_(file), config_(config), shard_(shard), sink_(sink) {}

  absl::Status LoadAll(LlamaWeights& weights) {
    HW_RETURN_IF_ERROR(LoadVocabulary("token_embd", weights.embedding));
    if (!config_.tied_embeddings) HW_RETURN_IF_ERROR(LoadVocabulary("output", weights.output));
    HW_RETURN_IF_ERROR(LoadVector("output_norm", weights.output_norm));
    HW_RETURN_IF_ERROR(LoadRopeFactors(weights));
    for (size_t i = 0; i < weights.layers.size(); ++i) {
      HW_RETURN_IF_ERROR(LoadLayer(Message("blk.", i, "."), weights.layers[i]));
    }
    return CheckNothingIsLeft();
  }

 private:
  absl::Status LoadLayer(const std::string& prefix, const LlamaLayer& layer) {
    const int64_t head_dim = config_.head_dim;
    HW_RETURN_IF_ERROR(LoadVector(prefix + "attn_norm", layer.attn_norm));
    HW_RETURN_IF_ERROR(Fill(layer.qkv, [&](float* to) { return LoadQkv(prefix, to); }));
    HW_RETURN_IF_ERROR(Fill(layer.attn_output, [&](float* to) {
      return LoadColumns(prefix + "attn_output", config_.num_query_heads * head_dim,
                         HeadRows(shard_.query_heads, head_dim), layer.attn_output.rows, to);
    }));
    HW_RETURN_IF_ERROR(LoadVector(prefix + "ffn_norm", layer.ffn_norm));
    HW_RETURN_IF_ERROR(Fill(layer.gate_up, [&](float* to) { return LoadGateUp(prefix, to); }));
    return Fill(layer.ffn_down, [&](float* to) {
      return LoadColumns(prefix + "ffn_down", config_.ffn_size, shard_.ffn, layer.ffn_down.rows,
                         to);
    });
  }

  absl::Status LoadQkv(const std::string& prefix, float* to) {
    const int64_t hidden = config_.hidden_size;
    const int64_t head_dim = config_.head_dim;
    const int64_t kv_rows = config_.num_kv_heads * head_dim;
    const Range q = HeadRows(shard_.query_heads, head_dim);
    const Range kv = HeadRows(shard_.kv_heads, head_dim);
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_q", config_.num_query_heads * head_dim, q, to));
    to += q.size * hidden;
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_k", kv_rows, kv, to));
    to += kv.size * hidden;
    return LoadRows(prefix + "attn_v", kv_rows, hidden, kv, to);
  }

  absl::Status LoadGateUp(const std::string& prefix, float* to) {
    const int64_t hidden = config_.hidden_size;
    HW_RETURN_IF_ERROR(LoadRows(prefix + "ffn_gate", config_.ffn_size, hidden, shard_.ffn, to));
    return LoadRows(prefix + "ffn_up", config_.ffn_size, hidden, shard_.ffn,
                    to + shard_.ffn.size * hidden);
  }

  // Calls body(where to write the matrix) between Begin() and Finish().
  template <class Body>
  absl::Status Fill(const WeightMatrix& matrix, const Body& body) {
    HW_RETURN_IF_ERROR(body(sink_.Begin(matrix)));
    return sink_.Finish(matrix);
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

  absl::Status LoadVector(const std::string& name, const WeightMatrix& to) {
    return Fill(to, [&](float* data) { return LoadRows(name, 1, to.cols, {0, 1}, data); });
  }

  absl::Status LoadVocabulary(const std::string& name, const WeightMatrix& to) {
    return Fill(to, [&](float* data) {
      return LoadRows(name, config_.vocab_size, config_.hidden_size, shard_.vocab, data);
    });
  }

  // Rows `range` of the tensor.
  absl::Status LoadRows(const std::string& name, int64_t rows, int64_t cols, const Range& range,
                        float* to) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, cols));
    DequantizeRows(tensor, range.begin, range.size, {to, static_cast<size_t>(range.size * cols)});
    return absl::OkStatus();
  }

  // GGUF stores rows 2i and 2i + 1 of a head where its rotation pairs rows i and
  // i + half; here they return to halves.
  absl::Status LoadRotated(const std::string& name, int64_t rows, const Range& range, float* to) {
    const int64_t cols = config_.hidden_size;
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, cols));
    const int64_t half = config_.head_dim / 2;
    for (int64_t row = 0; row < range.size; ++row) {
      const int64_t in_head = row % config_.head_dim;
      const int64_t halves = row - in_head + in_head / 2 + (in_head % 2) * half;
      DequantizeRows(tensor, range.begin + row, 1, {to + halves * cols, static_cast<size_t>(cols)});
    }
    return absl::OkStatus();
  }

  // Columns `range` of all `rows` rows.
  absl::Status LoadColumns(const std::string& name, int64_t cols, const Range& range, int64_t rows,
                           float* to) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, cols));
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = 0; r < rows; ++r) {
      DequantizeRows(tensor, r, 1, row);
      std::copy_n(row.begin() + range.begin, range.size, to + r * range.size);
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
  WeightSink& sink_;
  absl::flat_hash_set<std::string_view> used_;
};

}  // namespace

LlamaWeights LayOutLlamaWeights(const ModelConfig& config, const RankShard& shard,
                                const WeightFormat& format, int64_t& bytes) {
  LlamaWeights weights;
  ByteArena arena(format);
  LayOut(config, shard, arena, weights);
  bytes = arena.used();
  return weights;
}

absl::Status ReadLlamaWeights(const GgufFile& file, const ModelConfig& config,
                              const RankShard& shard, LlamaWeights& weights, WeightSink& sink) {
  return Loader(file, config, shard, sink).LoadAll(weights);
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
  InPlace sink;
  HW_RETURN_IF_ERROR(ReadLlamaWeights(file, config, shard, weights, sink));
  return weights;
}

}  // namespace heavywater
