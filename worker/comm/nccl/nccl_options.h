// A group of GPUs, over NCCL. Only builds with CUDA define what is declared here.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  int device = 0;                              // index of this rank's GPU
  std::string listen_address = "127.0.0.1";    // of the host's side, as in GlooOptions
  std::string interface = "";                  // likewise, and NCCL's unless its own is set
  absl::Duration timeout = absl::Seconds(30);  // of every operation, connecting included
  std::string key_prefix = "";                 // separates groups and epochs in the store
};

// Connects all ranks through `store`, which is not used afterwards, and returns
// when all are there. Makes `device` the calling thread's. To form the group again,
// destroy the communicator and create one with another key_prefix.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options,
                                                                     RendezvousStore& store);

}  // namespace heavywater
