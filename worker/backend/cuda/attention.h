// Attention of CudaBackend: what it asks of the device for a batch or a prompt's chunk.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

class CudaAttention {
 public:
  explicit CudaAttention(CudaContext& context) : context_(context) {}

  // As Backend's operations of these names, within an operation of `context`.
  absl::Status Attend(const KvShape& shape, const AttendParams& params, cudaStream_t stream);
  absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params, cudaStream_t stream);

 private:
  CudaContext& context_;
};

// INVALID_ARGUMENT naming the field when the kernels cannot run the shape.
absl::Status CheckCudaShape(const KvShape& shape);

// Scratch memory, without a device.
int64_t CudaAttendScratchBytes(const KvShape& shape, int64_t capacity, const RecallLimits& recall);
int64_t CudaPromptScratchBytes(const KvShape& shape, int64_t num_keys);

}  // namespace heavywater::cuda
