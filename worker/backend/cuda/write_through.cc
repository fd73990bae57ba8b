#include "worker/backend/cuda/write_through.h"

#include <algorithm>

#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {

absl::StatusOr<std::unique_ptr<WriteThrough>> WriteThrough::Create() {
  std::unique_ptr<WriteThrough> copies(new WriteThrough);
  HW_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&copies->stream_, cudaStreamNonBlocking));
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&copies->forked_, cudaEventDisableTiming));
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&copies->copied_, cudaEventDisableTiming));
  HW_RETURN_IF_CUDA_ERROR(
      cudaEventCreateWithFlags(&copies->captured_copied_, cudaEventDisableTiming));
  return copies;
}

WriteThrough::~WriteThrough() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (forked_ != nullptr) cudaEventDestroy(forked_);
  if (copied_ != nullptr) cudaEventDestroy(copied_);
  if (captured_copied_ != nullptr) cudaEventDestroy(captured_copied_);
}

absl::Status WriteThrough::Fork(cudaStream_t from) {
  HW_RETURN_IF_CUDA_ERROR(cudaEventRecord(forked_, from));
  return HW_CUDA_STATUS(cudaStreamWaitEvent(stream_, forked_, 0));
}

absl::StatusOr<unsigned long long> WriteThrough::CaptureOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  HW_RETURN_IF_CUDA_ERROR(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

absl::Status WriteThrough::Enqueued() {
  HW_ASSIGN_OR_RETURN(const unsigned long long capture, CaptureOf(stream_));
  if (capture != 0) {
    capture_ = capture;
    return HW_CUDA_STATUS(cudaEventRecord(captured_copied_, stream_));
  }
  ++copies_;
  return HW_CUDA_STATUS(cudaEventRecord(copied_, stream_));
}

absl::Status WriteThrough::Join(cudaStream_t to) {
  if (capture_ != 0) {
    HW_ASSIGN_OR_RETURN(const unsigned long long capture, CaptureOf(to));
    if (capture == capture_) return HW_CUDA_STATUS(cudaStreamWaitEvent(to, captured_copied_, 0));
  }
  auto joined = std::find_if(joined_.begin(), joined_.end(),
                             [&](const auto& entry) { return entry.first == to; });
  if (joined == joined_.end()) joined = joined_.insert(joined_.end(), {to, 0});
  if (joined->second == copies_) return absl::OkStatus();
  joined->second = copies_;
  return HW_CUDA_STATUS(cudaStreamWaitEvent(to, copied_, 0));
}

}  // namespace heavywater::cuda
