#include "worker/server/device_sharing.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr char kBootIdFile[] = "/proc/sys/kernel/random/boot_id";
constexpr size_t kMaxBytes = 256;  // of an identity

// The value in the store: host, line's end, device.
absl::StatusOr<std::string> Encode(const RankDevice& device) {
  for (const std::string& identity : {device.host, device.device}) {
    if (identity.size() > kMaxBytes || identity.find('\n') != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat("a device's identity has ", identity.size(),
                                                     " bytes, want one line of at most ",
                                                     kMaxBytes));
    }
  }
  return absl::StrCat(device.host, "\n", device.device);
}

absl::StatusOr<RankDevice> Decode(int rank, const std::string& value) {
  const size_t end = value.find('\n');
  if (end != std::string::npos) return RankDevice{value.substr(0, end), value.substr(end + 1)};
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " described its device in another format"));
}

}  // namespace

absl::StatusOr<std::string> HostIdentity() {
  std::ifstream file(kBootIdFile);
  std::string id;
  if (std::getline(file, id) && !id.empty()) return id;
  return absl::FailedPreconditionError(
      absl::StrCat("could not read ", kBootIdFile, ", which tells machines apart"));
}

absl::StatusOr<std::vector<RankDevice>> ExchangeDevices(const RankDevice& mine,
                                                        const ExchangeOptions& options,
                                                        RendezvousStore& store) {
  const auto key = [&](int rank) { return absl::StrCat(options.key_prefix, "device/", rank); };
  HW_ASSIGN_OR_RETURN(const std::string value, Encode(mine));
  HW_RETURN_IF_ERROR(store.Put(key(options.rank), value));
  std::vector<RankDevice> devices;
  for (int rank = 0; rank < options.size; ++rank) {
    HW_ASSIGN_OR_RETURN(const std::string other, store.Wait(key(rank), options.timeout));
    HW_ASSIGN_OR_RETURN(RankDevice device, Decode(rank, other));
    devices.push_back(std::move(device));
  }
  return devices;
}

absl::Status CheckDevicesDiffer(std::span<const RankDevice> ranks) {
  for (size_t later = 1; later < ranks.size(); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      if (ranks[earlier].host != ranks[later].host) continue;
      if (ranks[earlier].device != ranks[later].device) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", earlier, " and ", later, " use the same device ",
                       ranks[later].device, " of host ", ranks[later].host,
                       ", want one for each rank (device), or allow_shared_device on all of them"));
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
