// Host memory that backends on the CPU use as device memory.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/backend/device_buffer.h"

namespace heavywater {

// `bytes` (more than 0) of zeros, resident, aligned to a cache line. From 2 MiB on aligned to
// a huge page and backed by huge pages, where the system gives them: a long cache is read once
// per step, end to end, and with small pages a walk of the page tables for every 4 KiB costs a
// third of the bandwidth. RESOURCE_EXHAUSTED: the host has no memory left.
absl::StatusOr<DeviceBuffer> AllocateHostBuffer(int64_t bytes);

}  // namespace heavywater
