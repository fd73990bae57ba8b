// Attention of CudaBackend: what it asks of the device for a batch or a prompt's
// chunk. Nothing is allocated, nothing waited for: a step can be captured.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/cuda/context.h"
#include "worker/backend/cuda/recall.h"
#include "worker/backend/cuda/scratch_bytes.h"
#include "worker/backend/cuda/wave_scratch.h"
#include "worker/backend/cuda/whole_wave.h"

namespace heavywater::cuda {

class CudaAttention {
 public:
  explicit CudaAttention(CudaContext& context);

  // As Backend's operations of these names, within an operation of `context`.
  absl::Status Attend(const KvShape& shape, const AttendParams& params, cudaStream_t stream);
  absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params, cudaStream_t stream);

 private:
  // `host` are the wave's tokens, and `tokens` their copies on the device.
  absl::Status AttendWave(const KvShape& shape, float scale, std::span<const WaveToken> host,
                          const WaveToken* tokens, const WaveScratch& scratch, cudaStream_t stream);

  CudaContext& context_;
  CudaRecall recall_;
  const DeviceLimits limits_;
};

// INVALID_ARGUMENT naming the field when the kernels cannot run the shape.
absl::Status CheckCudaShape(const KvShape& shape);

}  // namespace heavywater::cuda
