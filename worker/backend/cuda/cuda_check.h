// The one way to call CUDA from host code: a failure names the expression.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"

namespace heavywater::cuda {

// OK, or the error as a status: RESOURCE_EXHAUSTED when memory is what lacks.
absl::Status CudaStatus(cudaError_t error, const char* expression);

}  // namespace heavywater::cuda

#define HW_CUDA_STATUS(expression) (::heavywater::cuda::CudaStatus((expression), #expression))

// Returns from the enclosing function when the call fails.
#define HW_RETURN_IF_CUDA_ERROR(expression)                                                  \
  do {                                                                                       \
    if (absl::Status hw_cuda_ = HW_CUDA_STATUS(expression); !hw_cuda_.ok()) return hw_cuda_; \
  } while (false)
