#include "worker/model/cuda/cuda_llama_runner.h"

#include <algorithm>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/model/cuda/device_weights.h"
#include "worker/model/cuda/llama_kernels.h"

namespace heavywater {
namespace {

cudaStream_t HandleOf(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaLlamaRunner>> CudaLlamaRunner::Create(
    const ModelFile& file, Communicator& comm, Backend& backend,
    std::unique_ptr<DeviceMatmul> matmul, const CudaLlamaOptions& options) {
  HW_RETURN_IF_ERROR(CheckMaxBatch(options.max_batch_tokens));
  HW_ASSIGN_OR_RETURN(const ModelConfig config, file.ReadConfig());
  HW_ASSIGN_OR_RETURN(const RankShard shard, MakeRankShard(config, comm.rank(), comm.size()));
  Stream stream;
  HW_ASSIGN_OR_RETURN(LlamaWeights weights,
                      LoadDeviceWeights(file, config, shard, options.weights, backend, stream));
  std::unique_ptr<CudaLlamaRunner> runner(new CudaLlamaRunner(
      config, shard, std::move(weights), comm, backend, std::move(matmul), options));
  HW_RETURN_IF_ERROR(runner->AllocateWorkspace());
  return runner;
}

CudaLlamaRunner::CudaLlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights,
                                 Communicator& comm, Backend& backend,
                                 std::unique_ptr<DeviceMatmul> matmul,
                                 const CudaLlamaOptions& options)
    : LlamaRunner(std::move(config), shard, std::move(weights), comm, options.max_batch_tokens),
      backend_(backend),
      matmul_(std::move(matmul)),
      device_(options.device),
      type_(options.weights),
      angles_(this->config().head_dim, this->config().rope_base, this->weights().rope_factors,
              RopeMagnitude(this->config().rope_scaling)) {}

absl::Status CudaLlamaRunner::AllocateWorkspace() {
  places_ = LayOutRunnerWorkspace(config(), shard(), max_tokens(), type_);
  HW_ASSIGN_OR_RETURN(workspace_, backend_.Allocate(places_.bytes));
  const int64_t logits = max_logits_tokens() * shard().max_vocab;
  exchange().partial = {At<float>(places_.partial), max_tokens() * config().hidden_size};
  exchange().logits = {At<float>(places_.logits), logits};
  exchange().gathered = {At<float>(places_.gathered), shard().size * logits};
  return absl::OkStatus();
}

const void* CudaLlamaRunner::DataOf(const WeightMatrix& matrix) const {
  return weights().memory.As<std::byte>().device_address() + matrix.offset;
}

absl::Status CudaLlamaRunner::UseDevice() const { return HW_CUDA_STATUS(cudaSetDevice(device_)); }

absl::Status CudaLlamaRunner::Normalise(DeviceSpan<const float> hidden, int64_t tokens,
                                        const WeightMatrix& weight, cudaStream_t stream) {
  HW_RETURN_IF_CUDA_ERROR(
      cuda::RmsNorm(hidden.device_address(), static_cast<const float*>(DataOf(weight)),
                    static_cast<float>(config().rms_epsilon), tokens, config().hidden_size, type_,
                    At<std::byte>(places_.normed), stream));
  return absl::OkStatus();
}

absl::Status CudaLlamaRunner::Multiply(const WeightMatrix& weights, int64_t x, int64_t tokens,
                                       int64_t out, int64_t out_stride, cudaStream_t stream) {
  if (weights.rows == 0) return absl::OkStatus();  // a rank without a part of the vocabulary
  if (weights.cols == 0) {                         // or of the feed-forward
    return HW_CUDA_STATUS(
        cudaMemsetAsync(At<float>(out), 0, tokens * out_stride * sizeof(float), stream));
  }
  return matmul_->Run({.type = type_,
                       .weights = DataOf(weights),
                       .x = At<std::byte>(x),
                       .out = At<float>(out),
                       .rows = weights.rows,
                       .cols = weights.cols,
                       .tokens = tokens,
                       .out_stride = out_stride},
                      At<std::byte>(places_.matmul), stream);
}

template <typename T>
absl::Status CudaLlamaRunner::Send(std::span<const T> values, int64_t place, Stream& stream) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  return backend_.CopyToDevice(workspace_.As<std::byte>(place, static_cast<int64_t>(bytes.size())),
                               bytes, stream);
}

absl::Status CudaLlamaRunner::SendAngles(std::span<const Position> positions, Stream& stream) {
  // All layers of a step ask for the same ones.
  if (std::ranges::equal(positions, sent_positions_)) return absl::OkStatus();
  sent_positions_.clear();
  angles_.SetPositions(positions);
  const auto size = positions.size() * static_cast<size_t>(angles_.half());
  HW_RETURN_IF_ERROR(Send(std::span(angles_.cosines(0), size), places_.cosines, stream));
  HW_RETURN_IF_ERROR(Send(std::span(angles_.sines(0), size), places_.sines, stream));
  sent_positions_.assign(positions.begin(), positions.end());
  return absl::OkStatus();
}

absl::Status CudaLlamaRunner::EmbedChunk(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                         Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  std::vector<int32_t> rows;
  for (const int32_t token : tokens) {
    const int64_t row = token - shard().vocab.begin;
    const bool here = row >= 0 && row < shard().vocab.size;
    rows.push_back(here ? static_cast<int32_t>(row) : -1);
  }
  HW_RETURN_IF_ERROR(Send(std::span<const int32_t>(rows), places_.rows, stream));
  return HW_CUDA_STATUS(cuda::EmbedRows(DataOf(weights().embedding), type_,
                                        At<int32_t>(places_.rows),
                                        static_cast<int64_t>(tokens.size()), config().hidden_size,
                                        hidden.device_address(), HandleOf(stream)));
}

absl::Status CudaLlamaRunner::QkvChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                                       std::span<const Position> positions, DeviceSpan<float> q,
                                       DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  const auto tokens = static_cast<int64_t>(positions.size());
  HW_RETURN_IF_ERROR(UseDevice());
  HW_RETURN_IF_ERROR(SendAngles(positions, stream));
  HW_RETURN_IF_ERROR(Normalise(hidden, tokens, layer.attn_norm, HandleOf(stream)));
  HW_RETURN_IF_ERROR(
      Multiply(layer.qkv, places_.normed, tokens, places_.qkv, layer.qkv.rows, HandleOf(stream)));
  HW_RETURN_IF_ERROR(PrepareQkv(layer, tokens, HandleOf(stream)));
  return HW_CUDA_STATUS(cuda::RotateQkv({.qkv = At<float>(places_.qkv),
                                         .cosines = At<float>(places_.cosines),
                                         .sines = At<float>(places_.sines),
                                         .q = q.device_address(),
                                         .k = k.device_address(),
                                         .v = v.device_address(),
                                         .tokens = tokens,
                                         .q_width = q_width(),
                                         .kv_width = kv_width(),
                                         .head_dim = config().head_dim},
                                        HandleOf(stream)));
}

absl::Status CudaLlamaRunner::PrepareQkv(const LlamaLayer& layer, int64_t tokens,
                                         cudaStream_t stream) {
  const auto vector = [this](const WeightMatrix& matrix) {
    return static_cast<const float*>(DataOf(matrix));
  };
  if (layer.qkv_bias.exists()) {
    HW_RETURN_IF_CUDA_ERROR(cuda::AddRow(vector(layer.qkv_bias), tokens, layer.qkv.rows,
                                         At<float>(places_.qkv), stream));
  }
  if (!layer.q_norm.exists()) return absl::OkStatus();
  return HW_CUDA_STATUS(cuda::NormHeads({.qkv = At<float>(places_.qkv),
                                         .q_norm = vector(layer.q_norm),
                                         .k_norm = vector(layer.k_norm),
                                         .epsilon = static_cast<float>(config().rms_epsilon),
                                         .tokens = tokens,
                                         .stride = layer.qkv.rows,
                                         .q_heads = shard().query_heads.size,
                                         .kv_heads = shard().kv_heads.size,
                                         .head_dim = config().head_dim},
                                        stream));
}

absl::Status CudaLlamaRunner::AttentionChunk(const LlamaLayer& layer,
                                             DeviceSpan<const float> attention, int64_t tokens,
                                             Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  HW_RETURN_IF_CUDA_ERROR(cuda::Convert(attention.device_address(), attention.size(), type_,
                                        At<std::byte>(places_.attention), HandleOf(stream)));
  return Multiply(layer.attn_output, places_.attention, tokens, places_.partial,
                  config().hidden_size, HandleOf(stream));
}

absl::Status CudaLlamaRunner::FeedForwardChunk(const LlamaLayer& layer,
                                               DeviceSpan<const float> hidden, int64_t tokens,
                                               Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  HW_RETURN_IF_ERROR(Normalise(hidden, tokens, layer.ffn_norm, HandleOf(stream)));
  HW_RETURN_IF_ERROR(Multiply(layer.gate_up, places_.normed, tokens, places_.gate_up,
                              layer.gate_up.rows, HandleOf(stream)));
  HW_RETURN_IF_CUDA_ERROR(cuda::SiluMultiply(At<float>(places_.gate_up), tokens,
                                             layer.ffn_down.cols, type_,
                                             At<std::byte>(places_.inner), HandleOf(stream)));
  return Multiply(layer.ffn_down, places_.inner, tokens, places_.partial, config().hidden_size,
                  HandleOf(stream));
}

absl::Status CudaLlamaRunner::AddPartial(DeviceSpan<float> hidden, Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  return HW_CUDA_STATUS(cuda::AddTo(At<float>(places_.partial), hidden.size(),
                                    hidden.device_address(), HandleOf(stream)));
}

absl::Status CudaLlamaRunner::LogitsChunk(DeviceSpan<const float> hidden, int64_t tokens,
                                          Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  HW_RETURN_IF_ERROR(Normalise(hidden, tokens, weights().output_norm, HandleOf(stream)));
  return Multiply(weights().output, places_.normed, tokens, places_.logits, shard().max_vocab,
                  HandleOf(stream));
}

absl::Status CudaLlamaRunner::PlaceLogits(int64_t tokens, DeviceSpan<float> logits,
                                          Stream& stream) {
  HW_RETURN_IF_ERROR(UseDevice());
  for (int rank = 0; rank < shard().size; ++rank) {
    const Range range = SplitInUnits(config().vocab_size, rank, shard().size);
    HW_RETURN_IF_CUDA_ERROR(
        cuda::PlaceColumns({.from = At<float>(places_.gathered) + rank * tokens * shard().max_vocab,
                            .to = logits.device_address(),
                            .tokens = tokens,
                            .width = range.size,
                            .from_stride = shard().max_vocab,
                            .to_stride = config().vocab_size,
                            .begin = range.begin},
                           HandleOf(stream)));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
