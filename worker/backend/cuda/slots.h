// Operations of CudaBackend that move K and V between slots, and between slots and
// the host tier. Arguments as Backend's operations of these names, within an
// operation of `context`.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

absl::Status Append(CudaContext& context, const KvShape& shape, const AppendParams& params,
                    cudaStream_t stream);
absl::Status GatherSlots(CudaContext& context, const KvShape& shape, const LayerView& from,
                         const LayerView& to, std::span<const Position> kept, int64_t kept_per_set,
                         DeviceSpan<const int64_t> seeds, int64_t seed_stride, cudaStream_t stream);
absl::Status PromoteSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          const PromoteParams& params, cudaStream_t stream);
absl::Status ReleaseSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          int set, std::span<const int32_t> slots, cudaStream_t stream);

}  // namespace heavywater::cuda
