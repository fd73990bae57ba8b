#include "worker/model/llama_weights.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "cache_service/base/status.h"
#include "worker/model/dequantize.h"
#include "worker/model/message.h"
#include "worker/model/weight_parts.h"

namespace heavywater {
namespace {

constexpr int64_t kHostAlign = 64;     // a cache line
constexpr int64_t kDeviceAlign = 256;  // what GPUs load best

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

bool IsVector(const MatrixParts& parts) { return parts.kind() != WeightKind::kMatrix; }

// Sizes the matrices and puts them one behind the other; bytes(parts) is what one takes.
// Returns what all take.
template <class Bytes>
int64_t LayOut(const std::vector<MatrixParts>& all, int64_t align, const Bytes& bytes) {
  int64_t used = 0;
  for (const MatrixParts& parts : all) {
    WeightMatrix& matrix = *parts.matrix;
    matrix.offset = used;
    const bool stands = parts.kind() == WeightKind::kStandingVector;
    matrix.is_vector = IsVector(parts);
    matrix.rows = stands ? 1 : parts.rows();
    matrix.cols = stands ? parts.rows() : parts.cols();
    used += RoundUp(bytes(parts), align);
  }
  return used;
}

void TieOutput(const ModelConfig& config, LlamaWeights& weights) {
  if (config.tied_embeddings) weights.output = weights.embedding;
}

// The tensors that parts are taken from, and which of the file's were.
class Tensors {
 public:
  explicit Tensors(const ModelFile& file) : file_(file) {}

  // INVALID_ARGUMENT when it has another shape than the part says.
  absl::StatusOr<GgufTensor> Find(const WeightPart& part) {
    HW_ASSIGN_OR_RETURN(GgufTensor tensor, file_.GetTensor(part.tensor));
    used_.insert(tensor.name);
    if (part.kind == WeightKind::kStandingVector && tensor.rows == 1) {
      HW_RETURN_IF_ERROR(Stand(tensor));
    }
    if (tensor.rows == part.rows && tensor.row_elements == part.cols) return tensor;
    return absl::InvalidArgumentError(Message("tensor '", tensor.name, "' is ", tensor.rows, " x ",
                                              tensor.row_elements, ", want ", part.rows, " x ",
                                              part.cols));
  }

  // [head_dim / 2]: the file's, or those of its scaling.
  absl::StatusOr<std::vector<float>> RopeFactorsOf(const ModelConfig& config) {
    constexpr char kName[] = "rope_freqs.weight";
    if (file_.FindTensor(kName) == nullptr) {
      return RopeFactors(config.rope_scaling, config.head_dim, config.rope_base);
    }
    if (config.rope_scaling.kind != RopeScaling::Kind::kNone) {
      return absl::UnimplementedError(Message(
          "tensor '", kName, "' is there and a RoPE scaling is set, want only one of them"));
    }
    const int64_t size = config.head_dim / 2;
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find({.tensor = kName,
                                                       .kind = WeightKind::kVector,
                                                       .rows = 1,
                                                       .cols = size,
                                                       .taken_rows = {0, 1},
                                                       .taken_columns = {0, size}}));
    std::vector<float> factors(static_cast<size_t>(size));
    DequantizeRows(tensor, 0, 1, factors);
    for (const float factor : factors) {
      if (std::isfinite(factor) && factor > 0) continue;
      return absl::InvalidArgumentError(
          Message("tensor '", kName, "' has the value ", factor, ", want positive numbers"));
    }
    return factors;
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

 private:
  // A vector as rows of one element. No vector is quantised in files that are about.
  static absl::Status Stand(GgufTensor& tensor) {
    const TensorBlock block = *TensorBlockOf(tensor.type);
    if (block.elements != 1) {
      return absl::UnimplementedError(Message("tensor '", tensor.name, "' has type ",
                                              TensorTypeName(tensor.type),
                                              ", want one of F32, F16, BF16 for a vector"));
    }
    tensor.rows = tensor.row_elements;
    tensor.row_elements = 1;
    tensor.row_bytes = block.bytes;
    return absl::OkStatus();
  }

  const ModelFile& file_;
  absl::flat_hash_set<std::string_view> used_;
};

// Calls row(tensor, its row, the matrix's row) for all rows of all parts.
template <class Row>
absl::Status ForEachRow(const MatrixParts& matrix, Tensors& tensors, const Row& row) {
  int64_t first = 0;
  for (const WeightPart& part : matrix.parts) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, tensors.Find(part));
    for (int64_t i = 0; i < part.taken_rows.size; ++i) {
      row(tensor, part.taken_rows.begin + i, first + part.TargetRow(i));
    }
    first += part.taken_rows.size;
  }
  return absl::OkStatus();
}

absl::StatusOr<RowCodec> ChooseCodec(const MatrixParts& matrix, Tensors& tensors) {
  if (IsVector(matrix)) return RowCodec::kFloat32;
  std::optional<RowCodec> codec;
  for (const WeightPart& part : matrix.parts) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, tensors.Find(part));
    const RowCodec own = CodecFor(tensor, part.taken_columns);
    codec = codec.has_value() ? CommonCodec(*codec, own) : own;
  }
  return *codec;
}

absl::Status Pack(const MatrixParts& parts, Tensors& tensors, std::byte* memory) {
  const WeightMatrix& matrix = *parts.matrix;
  const int64_t row_bytes = PackedRowBytes(matrix.codec, parts.cols());
  const Range columns = parts.parts.front().taken_columns;
  return ForEachRow(parts, tensors, [&](const GgufTensor& tensor, int64_t from, int64_t to) {
    PackRow(tensor, from, columns, matrix.codec, memory + matrix.offset + to * row_bytes);
  });
}

absl::Status Read(const MatrixParts& parts, Tensors& tensors, WeightSink& sink) {
  float* const out = sink.Begin(*parts.matrix);
  const Range columns = parts.parts.front().taken_columns;
  HW_RETURN_IF_ERROR(
      ForEachRow(parts, tensors, [&](const GgufTensor& tensor, int64_t from, int64_t to) {
        PackRow(tensor, from, columns, RowCodec::kFloat32,
                reinterpret_cast<std::byte*>(out + to * columns.size));
      }));
  return sink.Finish(*parts.matrix);
}

}  // namespace

LlamaWeights LayOutLlamaWeights(const ModelConfig& config, const RankShard& shard,
                                const WeightFormat& format, int64_t& bytes) {
  LlamaWeights weights;
  bytes = LayOut(PartsOf(config, shard, weights), kDeviceAlign, [&](const MatrixParts& parts) {
    return parts.rows() * parts.cols() *
           (IsVector(parts) ? format.vector_bytes : format.matrix_bytes);
  });
  TieOutput(config, weights);
  return weights;
}

absl::Status ReadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                              const RankShard& shard, LlamaWeights& weights, WeightSink& sink) {
  Tensors tensors(file);
  HW_ASSIGN_OR_RETURN(weights.rope_factors, tensors.RopeFactorsOf(config));
  for (const MatrixParts& parts : PartsOf(config, shard, weights)) {
    HW_RETURN_IF_ERROR(Read(parts, tensors, sink));
  }
  return tensors.CheckNothingIsLeft();
}

absl::StatusOr<LlamaWeights> LoadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                                              const RankShard& shard, Backend& backend) {
  Tensors tensors(file);
  LlamaWeights weights;
  const std::vector<MatrixParts> all = PartsOf(config, shard, weights);
  for (const MatrixParts& parts : all) {
    HW_ASSIGN_OR_RETURN(parts.matrix->codec, ChooseCodec(parts, tensors));
  }
  const int64_t bytes = LayOut(all, kHostAlign, [](const MatrixParts& parts) {
    return parts.rows() * PackedRowBytes(parts.matrix->codec, parts.cols());
  });
  HW_ASSIGN_OR_RETURN(weights.rope_factors, tensors.RopeFactorsOf(config));
  HW_ASSIGN_OR_RETURN(weights.memory, backend.Allocate(bytes));
  std::byte* const memory = weights.memory.As<std::byte>().device_address();
  for (const MatrixParts& parts : all) {
    parts.matrix->data = memory + parts.matrix->offset;
    HW_RETURN_IF_ERROR(Pack(parts, tensors, memory));
  }
  HW_RETURN_IF_ERROR(tensors.CheckNothingIsLeft());
  TieOutput(config, weights);
  return weights;
}

}  // namespace heavywater
