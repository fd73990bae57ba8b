#include "worker/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/attention.h"
#include "worker/backend/cuda/context.h"
#include "worker/backend/cuda/copies.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/ledger.h"
#include "worker/backend/cuda/rotate.h"
#include "worker/backend/cuda/scratch_bytes.h"
#include "worker/backend/cuda/select.h"
#include "worker/backend/cuda/sketches.h"
#include "worker/backend/cuda/slots.h"

namespace heavywater {
namespace {

using cuda::CudaContext;
using cuda::HandleOf;

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<CudaContext> context)
      : context_(std::move(context)), attention_(*context_), sketches_(*context_) {}
  ~CudaBackend() override {
    context_->Enter().IgnoreError();
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  std::string Name() const override { return "cuda"; }
  absl::Status CheckShape(const KvShape& shape) const override {
    return cuda::CheckCudaShape(shape);
  }
  int64_t AttendScratchBytes(const KvShape& shape, int64_t capacity,
                             const RecallLimits& recall) const override {
    return CudaAttendScratchBytes(shape, capacity, recall);
  }
  int64_t PromptScratchBytes(const KvShape& shape, int64_t num_keys) const override {
    return CudaPromptScratchBytes(shape, num_keys);
  }

  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override {
    return cuda::Allocate(*context_, bytes);
  }
  absl::Status CopyToDevice(DeviceSpan<std::byte> to, std::span<const std::byte> from,
                            Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::CopyToDevice(*context_, to, from, handle);
    });
  }
  absl::Status CopyToHost(std::span<std::byte> to, DeviceSpan<const std::byte> from,
                          Stream& stream) override {
    return Operate(
        stream, [&](cudaStream_t handle) { return cuda::CopyToHost(*context_, to, from, handle); });
  }
  absl::Status CopyOnDevice(DeviceSpan<std::byte> to, DeviceSpan<const std::byte> from,
                            Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::CopyOnDevice(*context_, to, from, handle);
    });
  }
  absl::Status Zero(DeviceSpan<std::byte> span, Stream& stream) override {
    return Operate(stream,
                   [&](cudaStream_t handle) { return cuda::Zero(*context_, span, handle); });
  }
  absl::Status Synchronize(Stream& stream) override {
    HW_RETURN_IF_ERROR(context_->Enter());
    return context_->Synchronize(HandleOf(stream));
  }
  absl::StatusOr<Stream> NewStream() override;
  absl::Status RegisterHostMemory(std::span<std::byte> memory) override {
    return cuda::RegisterHostMemory(*context_, memory);
  }
  absl::Status UnregisterHostMemory(std::span<std::byte> memory) override {
    return cuda::UnregisterHostMemory(*context_, memory);
  }

  absl::Status Append(const KvShape& shape, const AppendParams& params, Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckShape(shape));
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::Append(*context_, shape, params, handle);
    });
  }
  absl::Status Attend(const KvShape& shape, const AttendParams& params, Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckShape(shape));
    return Operate(stream,
                   [&](cudaStream_t handle) { return attention_.Attend(shape, params, handle); });
  }
  absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params,
                            Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckShape(shape));
    return Operate(stream, [&](cudaStream_t handle) {
      return attention_.AttendPrompt(shape, params, handle);
    });
  }

  absl::Status RotateKeys(const KvShape& shape, const RotateKeysParams& params,
                          Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::RotateKeys(*context_, shape, params, handle);
    });
  }
  absl::Status RotateQueries(const KvShape& shape, const RotateQueriesParams& params,
                             Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::RotateQueries(*context_, shape, params, handle);
    });
  }
  absl::Status CollectGains(const KvShape& shape, const LayerView& layer, DeviceSpan<int64_t> to,
                            Stream& stream) override {
    return Operate(
        stream, [&](cudaStream_t handle) { return cuda::CollectGains(shape, layer, to, handle); });
  }
  absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int64_t num_rows,
                       int64_t count, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::SumRows(from, to, num_rows, count, handle);
    });
  }
  absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from, double decay,
                         Stream& stream) override {
    return Operate(
        stream, [&](cudaStream_t handle) { return cuda::AddScores(layer, from, decay, handle); });
  }
  absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int num_rows,
                         int64_t count, Pooling pooling, int kernel, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::PoolVotes(from, to, num_rows, count, pooling, kernel, handle);
    });
  }
  absl::Status Select(const SelectParams& params, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) { return cuda::Select(params, handle); });
  }
  absl::Status CollectVictims(const VictimsParams& params, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::CollectVictims(*context_, params, handle);
    });
  }
  absl::Status GatherSlots(const KvShape& shape, const LayerView& from, const LayerView& to,
                           std::span<const Position> kept, int64_t kept_per_set,
                           DeviceSpan<const int64_t> seeds, int64_t seed_stride,
                           Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::GatherSlots(*context_, shape, from, to, kept, kept_per_set, seeds, seed_stride,
                               handle);
    });
  }

  absl::Status ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                              Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return sketches_.ObserveQueries(shape, params, handle);
    });
  }
  absl::Status ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                              Stream& stream) override {
    HW_RETURN_IF_ERROR(params.sketch.Validate());
    return Operate(stream, [&](cudaStream_t handle) {
      return sketches_.ChooseChannels(shape, params, handle);
    });
  }
  absl::Status EncodePages(const KvShape& shape, const EncodePagesParams& params,
                           Stream& stream) override {
    HW_RETURN_IF_ERROR(params.sketch.Validate());
    return Operate(
        stream, [&](cudaStream_t handle) { return sketches_.EncodePages(shape, params, handle); });
  }
  absl::Status PromoteSlots(const KvShape& shape, const LayerView& layer,
                            const PromoteParams& params, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::PromoteSlots(*context_, shape, layer, params, handle);
    });
  }
  absl::Status ReleaseSlots(const KvShape& shape, const LayerView& layer, int set,
                            std::span<const int32_t> slots, Stream& stream) override {
    return Operate(stream, [&](cudaStream_t handle) {
      return cuda::ReleaseSlots(*context_, shape, layer, set, slots, handle);
    });
  }

 private:
  // What an operation takes of the staging ring is held until its work is enqueued.
  template <class Body>
  absl::Status Operate(const Stream& stream, const Body& body) {
    HW_RETURN_IF_ERROR(context_->BeginOperation(HandleOf(stream)));
    absl::Status status = body(HandleOf(stream));
    status.Update(context_->EndOperation());
    return status;
  }

  std::unique_ptr<CudaContext> context_;
  cuda::CudaAttention attention_;
  cuda::CudaSketches sketches_;
  std::vector<cudaStream_t> streams_;
};

absl::StatusOr<Stream> CudaBackend::NewStream() {
  HW_RETURN_IF_ERROR(context_->Enter());
  cudaStream_t stream = nullptr;
  // It does not wait for CUDA's default stream, nor that for it.
  HW_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  streams_.push_back(stream);
  return Stream{.handle = stream};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options) {
  HW_ASSIGN_OR_RETURN(std::unique_ptr<CudaContext> context, CudaContext::Create(options.device));
  return std::make_unique<CudaBackend>(std::move(context));
}

}  // namespace heavywater
