// A build without CUDA.
#include "absl/strings/str_cat.h"
#include "worker/server/gpu.h"

namespace heavywater {
namespace {

absl::Status Absent(const char* field, const char* value) {
  return absl::FailedPreconditionError(
      absl::StrCat(field, " is \"", value, "\" and this binary was built without CUDA"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device) {
  return Absent("backend", "cuda");
}

absl::StatusOr<std::string> GpuIdentity(int device) { return Absent("backend", "cuda"); }

absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpus(const NcclOptions& options,
                                                          RendezvousStore& store) {
  return Absent("communicator", "nccl");
}

}  // namespace heavywater
