#include "worker/comm/nccl/nccl_check.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace heavywater {

absl::Status NcclStatus(ncclResult_t result, const char* expression) {
  if (result == ncclSuccess) return absl::OkStatus();
  std::string message = absl::StrCat(expression, ": ", ncclGetErrorString(result));
  const char* detail = ncclGetLastError(nullptr);
  if (detail != nullptr && *detail != '\0') absl::StrAppend(&message, ": ", detail);
  if (result == ncclRemoteError || result == ncclSystemError) {
    return absl::UnavailableError(message);
  }
  return absl::InternalError(message);
}

}  // namespace heavywater
