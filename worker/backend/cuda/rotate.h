// Rotation at attention. Arguments as Backend's operations of these names, within an
// operation of `context`.
#pragma once

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

absl::Status RotateKeys(CudaContext& context, const KvShape& shape, const RotateKeysParams& params,
                        cudaStream_t stream);
absl::Status RotateQueries(CudaContext& context, const KvShape& shape,
                           const RotateQueriesParams& params, cudaStream_t stream);

}  // namespace heavywater::cuda
