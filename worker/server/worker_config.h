// The worker's configuration: defaults, checks, and what all ranks must share.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/security/channels.h"
#include "heavywater/v1/config.pb.h"

namespace heavywater {

v1::WorkerConfig DefaultWorkerConfig();

// INVALID_ARGUMENT naming the field, what came and what was wanted.
absl::Status CheckWorkerConfig(const v1::WorkerConfig& config);

// How this rank calls the cache service and the other ranks.
// cache_address, taken apart; none where it is empty.
std::vector<std::string> CacheAddressesOf(const v1::WorkerConfig& config);

ChannelSecurity ChannelSecurityOf(const v1::WorkerConfig& config);

// Text and hash of everything that must be equal on all ranks of a group.
std::string ConfigDigest(const v1::WorkerConfig& config);

}  // namespace heavywater
