// How the ranks of an NCCL group find each other.
#pragma once

#include <nccl.h>

#include "absl/status/statusor.h"
#include "worker/comm/nccl/nccl_options.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// The id that rank 0 makes and puts into the store. FAILED_PRECONDITION naming both
// versions when a rank's NCCL is another than rank 0's.
absl::StatusOr<ncclUniqueId> ShareUniqueId(const NcclOptions& options, RendezvousStore& store);

// Tells NCCL which interface its own connections use, unless its environment
// variable says so. Before NCCL's first call in the process.
void SetSocketInterface(const NcclOptions& options);

}  // namespace heavywater
