// The choice of what stays, and whom it gave up (Backend's Select, CollectVictims).
#pragma once

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

absl::Status Select(const SelectParams& params, cudaStream_t stream);
absl::Status CollectVictims(CudaContext& context, const VictimsParams& params, cudaStream_t stream);

}  // namespace heavywater::cuda
