// A rank other than 0: does what rank 0 says.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/server/command_runner.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

// Until rank 0 says Shutdown (OK), is gone (UNAVAILABLE), says nothing for
// `timeout` (DEADLINE_EXCEEDED), or the group has failed.
absl::Status RunFollower(CommandRunner& runner, WorkerMetrics& metrics, absl::Duration timeout);

}  // namespace heavywater
