#include "worker/server/connect_ranks.h"

#include <utility>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/comm/staged/staged_communicator.h"
#include "worker/server/device_sharing.h"
#include "worker/server/gpu.h"

namespace heavywater {
namespace {

absl::Duration TimeoutOf(const v1::WorkerConfig& config) {
  return absl::Milliseconds(config.comm_timeout_ms());
}

// Of ranks' host memory.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectHosts(const v1::WorkerConfig& config,
                                                           const std::string& key_prefix,
                                                           RendezvousStore* store) {
  if (config.size() == 1) return std::move(CreateLocalGroup(1, TimeoutOf(config)).front());
  return CreateGlooCommunicator({.rank = config.rank(),
                                 .size = config.size(),
                                 .listen_address = config.comm_address(),
                                 .interface = config.comm_interface(),
                                 .timeout = TimeoutOf(config),
                                 .key_prefix = key_prefix},
                                *store);
}

absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpuRanks(const v1::WorkerConfig& config,
                                                              const std::string& key_prefix,
                                                              RendezvousStore& store) {
  return ConnectGpus({.rank = config.rank(),
                      .size = config.size(),
                      .device = config.device(),
                      .listen_address = config.comm_address(),
                      .interface = config.comm_interface(),
                      .timeout = TimeoutOf(config),
                      .key_prefix = key_prefix},
                     store);
}

// Whether NCCL joins the ranks; every rank comes to the same answer.
absl::StatusOr<bool> UseNccl(const v1::WorkerConfig& config, const std::string& key_prefix,
                             RendezvousStore* store) {
  if (config.backend() != "cuda") return false;
  if (config.size() == 1) return config.communicator() == "nccl";
  RankDevice mine;
  HW_ASSIGN_OR_RETURN(mine.host, HostIdentity());
  HW_ASSIGN_OR_RETURN(mine.device, GpuIdentity(config.device()));
  HW_ASSIGN_OR_RETURN(const std::vector<RankDevice> devices,
                      ExchangeDevices(mine,
                                      {.rank = config.rank(),
                                       .size = config.size(),
                                       .timeout = TimeoutOf(config),
                                       .key_prefix = key_prefix},
                                      *store));
  const absl::Status differ = CheckDevicesDiffer(devices);
  if (!config.allow_shared_device()) HW_RETURN_IF_ERROR(differ);
  return differ.ok() && config.communicator() != "gloo";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> ConnectRanks(const v1::WorkerConfig& config,
                                                           const std::string& key_prefix,
                                                           RendezvousStore* store,
                                                           Backend& backend) {
  HW_ASSIGN_OR_RETURN(const bool use_nccl, UseNccl(config, key_prefix, store));
  InProcessRendezvous alone;  // a single rank needs nobody else's
  if (use_nccl) return ConnectGpuRanks(config, key_prefix, store == nullptr ? alone : *store);
  HW_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, ConnectHosts(config, key_prefix, store));
  if (config.backend() != "cuda") return host;
  return std::make_unique<StagedCommunicator>(std::move(host), backend);
}

}  // namespace heavywater
