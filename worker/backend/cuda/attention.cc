#include "worker/backend/cuda/attention.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/host_memory.h"

namespace heavywater::cuda {

absl::Status CudaAttention::Attend(const KvShape& shape, const AttendParams& params,
                                   cudaStream_t stream) {
  return absl::UnimplementedError("Attend");
}
absl::Status CudaAttention::AttendPrompt(const KvShape& shape, const PromptParams& params,
                                         cudaStream_t stream) {
  return absl::UnimplementedError("AttendPrompt");
}

absl::Status CheckCudaShape(const KvShape& shape) {
  HW_RETURN_IF_ERROR(CheckBackendShape(shape));
  if (shape.head_dim > 256) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim, ", want at most 256"));
  }
  return absl::OkStatus();
}

int64_t CudaAttendScratchBytes(const KvShape& shape, int64_t capacity, const RecallLimits& recall) {
  return 0;
}
int64_t CudaPromptScratchBytes(const KvShape& shape, int64_t num_keys) { return 0; }

}  // namespace heavywater::cuda
