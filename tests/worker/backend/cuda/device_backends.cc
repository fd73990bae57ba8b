// The CUDA backend on the machine's first device.
#include "tests/worker/backend/backend_factory.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {

std::vector<std::string> TestBackendNames() { return {"cuda"}; }

absl::StatusOr<std::unique_ptr<Backend>> CreateTestBackend(const std::string& name) {
  return CreateCudaBackend({.device = 0});
}

std::string TestBackendComplaint() { return ""; }

}  // namespace heavywater
