// Llama-family models on a GPU, tensor parallel: weights in bfloat16 or float32,
// everything between the matrix products in float32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/model/cuda/device_matmul.h"
#include "worker/model/cuda/runner_bytes.h"
#include "worker/model/llama_runner.h"
#include "worker/model/model_file.h"
#include "worker/model/rope_angles.h"

namespace heavywater {

struct CudaLlamaOptions {
  int device = 0;              // the backend's
  int max_batch_tokens = 512;  // rows computed at once; more are cut into chunks
  WeightType weights = WeightType::kBFloat16;
};

// All work is queued on the caller's stream, always the same one; nothing waits.
// Memory comes from the backend.
class CudaLlamaRunner final : public LlamaRunner {
 public:
  // Loads the shard of rank comm.rank() of comm.size(); `file` is not used
  // afterwards. `comm` and `backend` must outlive the runner. Errors as
  // ModelFile::ReadConfig(), MakeRankShard() and LoadDeviceWeights().
  static absl::StatusOr<std::unique_ptr<CudaLlamaRunner>> Create(
      const ModelFile& file, Communicator& comm, Backend& backend,
      std::unique_ptr<DeviceMatmul> matmul, const CudaLlamaOptions& options);

  int64_t device_bytes() const override { return weight_bytes() + workspace_.bytes(); }

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
  CudaLlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights, Communicator& comm,
                  Backend& backend, std::unique_ptr<DeviceMatmul> matmul,
                  const CudaLlamaOptions& options);

  absl::Status AllocateWorkspace();
  // A place of the workspace, or of a matrix.
  template <typename T>
  T* At(int64_t place) const {
    return reinterpret_cast<T*>(workspace_.As<std::byte>().device_address() + place);
  }
  const void* DataOf(const WeightMatrix& matrix) const;

  // The calling thread's device; before each chunk's part.
  absl::Status UseDevice() const;
  // normed = RMS norm of the rows of hidden.
  absl::Status Normalise(DeviceSpan<const float> hidden, int64_t tokens, const WeightMatrix& weight,
                         cudaStream_t stream);
  // Rows of `x` and of the weights are of the weights' type.
  absl::Status Multiply(const WeightMatrix& weights, int64_t x, int64_t tokens, int64_t out,
                        int64_t out_stride, cudaStream_t stream);
  // What an architecture does to rows of Q, K and V before RoPE, if anything.
  absl::Status PrepareQkv(const LlamaLayer& layer, int64_t tokens, cudaStream_t stream);
  // The angles of the positions to the device, unless they are there.
  absl::Status SendAngles(std::span<const Position> positions, Stream& stream);
  template <typename T>
  absl::Status Send(std::span<const T> values, int64_t place, Stream& stream);

  Backend& backend_;
  const std::unique_ptr<DeviceMatmul> matmul_;
  const int device_;
  const WeightType type_;
  RunnerWorkspace places_;
  DeviceBuffer workspace_;
  RopeAngles angles_;
  std::vector<Position> sent_positions_;
};

}  // namespace heavywater
