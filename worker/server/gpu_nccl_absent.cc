// A build without NCCL.
#include "worker/server/gpu.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpus(const NcclOptions& options,
                                                          RendezvousStore& store) {
  return absl::FailedPreconditionError(
      "ranks on GPUs would be joined by NCCL, and this binary was built without it; communicator "
      "\"gloo\" goes through the host");
}

}  // namespace heavywater
