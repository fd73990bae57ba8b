// Scratch memory of CudaBackend's attention. Plain C++: needs neither a device nor
// CUDA's headers.
#pragma once

#include <cstdint>

#include "worker/backend/recall.h"
#include "worker/cache/kv_layout.h"

namespace heavywater {

// As Backend's functions of these names.
int64_t CudaAttendScratchBytes(const KvShape& shape, int64_t capacity, const RecallLimits& recall);
int64_t CudaPromptScratchBytes(const KvShape& shape, int64_t num_keys);

}  // namespace heavywater
