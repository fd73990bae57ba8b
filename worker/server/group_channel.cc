#include "worker/server/group_channel.h"

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {

absl::Status SendCommand(const v1::GroupCommand& command, Communicator& communicator,
                         absl::Duration timeout) {
  const size_t bytes = command.ByteSizeLong();
  if (bytes > static_cast<size_t>(kMaxBroadcastBytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("group command has ", bytes, " bytes, want at most ", kMaxBroadcastBytes));
  }
  std::vector<std::byte> data(bytes);
  command.SerializeToArray(data.data(), static_cast<int>(bytes));
  return communicator.Broadcast(data, /*root=*/0, timeout);
}

absl::StatusOr<v1::GroupCommand> ReceiveCommand(Communicator& communicator,
                                                absl::Duration timeout) {
  std::vector<std::byte> data;
  HW_RETURN_IF_ERROR(communicator.Broadcast(data, /*root=*/0, timeout));
  v1::GroupCommand command;
  if (!command.ParseFromArray(data.data(), static_cast<int>(data.size()))) {
    return absl::DataLossError(
        absl::StrCat("group command of ", data.size(), " bytes from rank 0 cannot be parsed"));
  }
  return command;
}

}  // namespace heavywater
