#include "worker/backend/cuda/cuda_check.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace heavywater::cuda {

absl::Status CudaStatus(cudaError_t error, const char* expression) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(expression, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  // What is not sticky would otherwise be reported again by the next launch.
  cudaGetLastError();
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorStreamCaptureUnsupported:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace heavywater::cuda
