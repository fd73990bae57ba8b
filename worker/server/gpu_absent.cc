// A build without CUDA.
#include "worker/server/gpu.h"

namespace heavywater {
namespace {

absl::Status Absent() {
  return absl::FailedPreconditionError(
      "backend is \"cuda\" and this binary was built without CUDA");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device) { return Absent(); }

absl::StatusOr<std::string> GpuIdentity(int device) { return Absent(); }

absl::StatusOr<std::unique_ptr<LlamaRunner>> CreateGpuRunner(const ModelFile& file,
                                                             Communicator& communicator,
                                                             Backend& backend,
                                                             const GpuRunnerOptions& options) {
  return Absent();
}

}  // namespace heavywater
