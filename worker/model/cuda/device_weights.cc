#include "worker/model/cuda/device_weights.h"

#include <span>
#include <utility>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

class DeviceSink final : public WeightSink {
 public:
  DeviceSink(const DeviceBuffer& memory, WeightType type, Backend& backend, Stream& stream)
      : memory_(memory), type_(type), backend_(backend), stream_(stream) {}

  float* Begin(const WeightMatrix& matrix) override {
    values_.resize(static_cast<size_t>(matrix.rows * matrix.cols));
    return values_.data();
  }

  absl::Status Finish(const WeightMatrix& matrix) override {
    const bool rounds = type_ == WeightType::kBFloat16 && !matrix.is_vector;
    if (!rounds) return Copy(matrix, std::as_bytes(std::span(values_)));
    rounded_.resize(values_.size());
    for (size_t i = 0; i < values_.size(); ++i) rounded_[i] = FloatToBFloat16(values_[i]);
    return Copy(matrix, std::as_bytes(std::span(rounded_)));
  }

 private:
  absl::Status Copy(const WeightMatrix& matrix, std::span<const std::byte> bytes) {
    return backend_.CopyToDevice(
        memory_.As<std::byte>(matrix.offset, static_cast<int64_t>(bytes.size())), bytes, stream_);
  }

  const DeviceBuffer& memory_;
  const WeightType type_;
  Backend& backend_;
  Stream& stream_;
  std::vector<float> values_;
  std::vector<uint16_t> rounded_;
};

}  // namespace

absl::StatusOr<LlamaWeights> LoadDeviceWeights(const ModelFile& file, const ModelConfig& config,
                                               const RankShard& shard, WeightType type,
                                               Backend& backend, Stream& stream) {
  int64_t bytes = 0;
  LlamaWeights weights = LayOutLlamaWeights(config, shard, FormatOf(type), bytes);
  HW_ASSIGN_OR_RETURN(weights.memory, backend.Allocate(bytes));
  DeviceSink sink(weights.memory, type, backend, stream);
  HW_RETURN_IF_ERROR(ReadLlamaWeights(file, config, shard, weights, sink));
  HW_RETURN_IF_ERROR(backend.Synchronize(stream));
  return weights;
}

}  // namespace heavywater
