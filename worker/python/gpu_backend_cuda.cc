// A module with CUDA.
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/python/gpu_backend.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device) {
  return CreateCudaBackend({.device = device});
}

}  // namespace heavywater
