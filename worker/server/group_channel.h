// Rank 0's word to the other ranks: one command before each thing that the
// group does together.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "heavywater/v1/step.pb.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// Rank 0: tells the others. RESOURCE_EXHAUSTED when the command is too large.
absl::Status SendCommand(const v1::GroupCommand& command, Communicator& communicator,
                         absl::Duration timeout);

// The others: waits for rank 0. UNAVAILABLE when it is gone, DEADLINE_EXCEEDED
// when nothing came within `timeout` (it says something about every second).
absl::StatusOr<v1::GroupCommand> ReceiveCommand(Communicator& communicator, absl::Duration timeout);

// How often rank 0 speaks while nothing runs.
inline constexpr absl::Duration kIdleInterval = absl::Seconds(1);

}  // namespace heavywater
