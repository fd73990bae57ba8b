// The CUDA backend, where this module was built with it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

// GPU number `device`. FAILED_PRECONDITION naming it: a module without CUDA, a machine without
// the device.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device);

}  // namespace heavywater
