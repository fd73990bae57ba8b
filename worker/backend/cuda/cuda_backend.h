// The backend on an NVIDIA device: CreateCudaBackend().
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

struct CudaBackendOptions {
  int device = 0;  // as CUDA counts them
};
// FAILED_PRECONDITION when the machine lacks the device. One thread at a time uses a
// backend; several backends, of one device or of several, do not disturb each other.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

}  // namespace heavywater
