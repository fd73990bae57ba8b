// Finds ranks that use one device by mistake: each would count on all its memory.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// What a rank runs on. Both are identities, equal only for the same machine and
// the same device of it.
struct RankDevice {
  std::string host;
  std::string device;
};

// This machine's, the same in all its containers: the kernel's boot id.
absl::StatusOr<std::string> HostIdentity();

struct ExchangeOptions {
  int rank = 0;
  int size = 1;
  absl::Duration timeout = absl::Seconds(30);  // for each rank's answer
  std::string key_prefix = "";                 // separates groups and epochs in the store
};
// Tells the others through the store; [rank] of the result is rank's. Errors of the
// store's; INVALID_ARGUMENT when an identity is too long or has a line's end.
absl::StatusOr<std::vector<RankDevice>> ExchangeDevices(const RankDevice& mine,
                                                        const ExchangeOptions& options,
                                                        RendezvousStore& store);

// FAILED_PRECONDITION naming two ranks and their device when they share one; the
// same on every rank.
absl::Status CheckDevicesDiffer(std::span<const RankDevice> ranks);

}  // namespace heavywater
