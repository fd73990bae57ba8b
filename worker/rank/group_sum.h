// Sums over the ranks of what a step or a command exchanges.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// A collective: device memory in place, ready for the host.
absl::Status SumInPlace(DeviceSpan<int64_t> data, Communicator& communicator, Stream& stream);

// A collective: every rank passes as many numbers.
absl::StatusOr<std::vector<int64_t>> SumOverRanks(std::vector<int64_t> numbers, Backend& backend,
                                                  Communicator& communicator, Stream& stream);

// A collective, whose status it returns. `agreed`: OK when `status` is OK on every
// rank; else, on every rank, the first failing rank's code (with the message where
// it is the own one).
absl::Status AgreeOnStatus(const absl::Status& status, Backend& backend, Communicator& communicator,
                           Stream& stream, absl::Status& agreed);

}  // namespace heavywater
