#include "worker/comm/nccl/nccl_connect.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache_service/base/status.h"
#include "worker/comm/nccl/nccl_check.h"

namespace heavywater {
namespace {

// The value in the store: the version, a colon, then the id's bytes or, where rank
// 0 could make none, why.
constexpr char kOk = '=';
constexpr char kFailed = '!';

absl::StatusOr<int> Version() {
  int version = 0;
  HW_RETURN_IF_ERROR(HW_NCCL_STATUS(ncclGetVersion(&version)));
  return version;
}

absl::StatusOr<ncclUniqueId> MakeId(int version, const std::string& key, RendezvousStore& store) {
  ncclUniqueId id;
  const absl::Status made = HW_NCCL_STATUS(ncclGetUniqueId(&id));
  std::string value = absl::StrCat(version, ":");
  if (made.ok()) {
    value.append(1, kOk).append(id.internal, sizeof(id.internal));
  } else {
    value.append(1, kFailed).append(made.message().data(), made.message().size());
  }
  HW_RETURN_IF_ERROR(store.Put(key, value));
  if (!made.ok()) return made;
  return id;
}

absl::StatusOr<ncclUniqueId> ReadId(int version, const std::string& value) {
  const size_t colon = value.find(':');
  int theirs = 0;
  if (colon == std::string::npos || colon + 1 >= value.size() ||
      !absl::SimpleAtoi(value.substr(0, colon), &theirs)) {
    return absl::FailedPreconditionError("rank 0 sent an NCCL id of another format");
  }
  if (theirs != version) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL is version ", version, " here and ", theirs, " on rank 0"));
  }
  const std::string rest = value.substr(colon + 2);
  if (value[colon + 1] == kFailed) {
    return absl::UnavailableError(absl::StrCat("rank 0 could not make an NCCL id: ", rest));
  }
  ncclUniqueId id;
  if (rest.size() != sizeof(id.internal)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank 0's NCCL id has ", rest.size(), " bytes, want ", sizeof(id.internal)));
  }
  std::memcpy(id.internal, rest.data(), sizeof(id.internal));
  return id;
}

}  // namespace

absl::StatusOr<ncclUniqueId> ShareUniqueId(const NcclOptions& options, RendezvousStore& store) {
  const std::string key = absl::StrCat(options.key_prefix, "nccl_id");
  HW_ASSIGN_OR_RETURN(const int version, Version());
  if (options.rank == 0) return MakeId(version, key, store);
  HW_ASSIGN_OR_RETURN(const std::string value, store.Wait(key, options.timeout));
  return ReadId(version, value);
}

void SetSocketInterface(const NcclOptions& options) {
  if (options.interface.empty()) return;
  setenv("NCCL_SOCKET_IFNAME", options.interface.c_str(), /*overwrite=*/0);
}

}  // namespace heavywater
