// A module without CUDA.
#include "absl/strings/str_cat.h"
#include "worker/python/gpu_backend.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device) {
  return absl::FailedPreconditionError(
      absl::StrCat("device is \"cuda:", device, "\" and this module was built without CUDA"));
}

}  // namespace heavywater
