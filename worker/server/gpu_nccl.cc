// A build with NCCL.
#include "worker/server/gpu.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpus(const NcclOptions& options,
                                                          RendezvousStore& store) {
  return CreateNcclCommunicator(options, store);
}

}  // namespace heavywater
