#include "worker/backend/cuda/write_through.h"

#include <algorithm>

#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {

absl::StatusOr<std::unique_ptr<WriteThrough>> WriteThrough::Create() {
  std::unique_ptr<WriteThrough> copies(new WriteThrough);
  HW_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&copies->stream_, cudaStreamNonBlocking));
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&copies->forked_, cudaEventDisableTiming));
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&copies->copied_, cudaEventDisableTiming));
  return copies;
}

WriteThrough::~WriteThrough() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (forked_ != nullptr) cudaEventDestroy(forked_);
  if (copied_ != nullptr) cudaEventDestroy(copied_);
}

absl::Status WriteThrough::Fork(cudaStream_t from) {
  HW_RETURN_IF_CUDA_ERROR(cudaEventRecord(forked_, from));
  return HW_CUDA_STATUS(cudaStreamWaitEvent(stream_, forked_, 0));
}

absl::Status WriteThrough::Enqueued() {
  ++copies_;
  return HW_CUDA_STATUS(cudaEventRecord(copied_, stream_));
}

absl::Status WriteThrough::Join(cudaStream_t to) {
  auto joined = std::find_if(joined_.begin(), joined_.end(),
                             [&](const auto& entry) { return entry.first == to; });
  if (joined == joined_.end()) joined = joined_.insert(joined_.end(), {to, 0});
  if (joined->second == copies_) return absl::OkStatus();
  joined->second = copies_;
  return HW_CUDA_STATUS(cudaStreamWaitEvent(to, copied_, 0));
}

}  // namespace heavywater::cuda
