// CUDA's results as Status.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {

// OK for cudaSuccess. RESOURCE_EXHAUSTED where the device has no memory left,
// FAILED_PRECONDITION without driver or device, INVALID_ARGUMENT for a device that
// is not there, else INTERNAL; names the expression and CUDA's words.
inline absl::Status CudaStatus(cudaError_t result, const char* expression) {
  if (result == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(expression, ": ", cudaGetErrorName(result), " (",
                                           cudaGetErrorString(result), ")");
  switch (result) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
      return absl::FailedPreconditionError(message);
    case cudaErrorInvalidDevice:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace heavywater

// The status of a call of CUDA's, naming it.
#define HW_CUDA_STATUS(expression) ::heavywater::CudaStatus((expression), #expression)

// Returns from the enclosing function when a call of CUDA's failed.
#define HW_RETURN_IF_CUDA_ERROR(expression) HW_RETURN_IF_ERROR(HW_CUDA_STATUS(expression))
