// Which communicator joins the ranks of a group.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "heavywater/v1/config.pb.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// Connects the ranks. `store` is null for a worker without a cache service;
// `backend` is the rank's and outlives the communicator.
using CommunicatorFactory = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    const v1::WorkerConfig& config, const std::string& key_prefix, RendezvousStore* store,
    Backend& backend)>;

// As config.communicator says. With backend cuda the ranks first tell each other
// which GPU they use: FAILED_PRECONDITION naming both ranks when two use one, unless
// allow_shared_device.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectRanks(const v1::WorkerConfig& config,
                                                           const std::string& key_prefix,
                                                           RendezvousStore* store,
                                                           Backend& backend);

}  // namespace heavywater
