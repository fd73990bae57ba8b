#include "worker/backend/cuda/scratch_bytes.h"

#include "worker/backend/cuda/wave_scratch.h"

namespace heavywater {

int64_t CudaAttendScratchBytes(const KvShape& shape, int64_t capacity, const RecallLimits& recall) {
  return cuda::WaveScratchBytes(shape, cuda::NeedsOf(capacity, recall));
}

int64_t CudaPromptScratchBytes(const KvShape& shape, int64_t num_keys) {
  return cuda::PromptTotals(num_keys) * shape.num_query_heads *
         static_cast<int64_t>(sizeof(cuda::SplitSum));
}

}  // namespace heavywater
