// What attention works in on a GPU, where there need not be one.
#pragma once

#include "worker/backend/backend.h"
#include "worker/backend/cuda/scratch_bytes.h"

namespace heavywater {

class CudaScratch final : public ScratchSizes {
 public:
  int64_t AttendScratchBytes(const KvShape& shape, int64_t capacity,
                             const RecallLimits& recall) const override {
    return CudaAttendScratchBytes(shape, capacity, recall);
  }
  int64_t PromptScratchBytes(const KvShape& shape, int64_t num_keys) const override {
    return CudaPromptScratchBytes(shape, num_keys);
  }
};

}  // namespace heavywater
