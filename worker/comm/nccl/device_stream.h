// All that the communicator needs of the CUDA runtime.
#pragma once

#include "absl/status/status.h"
#include "worker/backend/device_buffer.h"

namespace heavywater {

// Makes device `device` the calling thread's. INVALID_ARGUMENT or INTERNAL with
// CUDA's words.
absl::Status UseDevice(int device);

// Waits for all work queued on the stream.
absl::Status SynchronizeStream(const Stream& stream);

}  // namespace heavywater
