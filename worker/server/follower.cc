#include "worker/server/follower.h"

#include "cache_service/base/status.h"
#include "worker/server/group_channel.h"

namespace heavywater {

absl::Status RunFollower(CommandRunner& runner, WorkerMetrics& metrics, absl::Duration timeout) {
  while (true) {
    HW_ASSIGN_OR_RETURN(const v1::GroupCommand command,
                        ReceiveCommand(runner.communicator(), timeout));
    if (command.has_close()) metrics.Update(runner.cache(), /*now=*/true);
    HW_RETURN_IF_ERROR(runner.Run(command).status());
    if (command.has_shutdown()) return absl::OkStatus();
    metrics.Update(runner.cache());
    metrics.SetSequences(0, runner.cache().num_sequences());
  }
}

}  // namespace heavywater
