#include "worker/backend/cuda/slots.h"

namespace heavywater::cuda {
absl::Status Append(CudaContext& context, const KvShape& shape, const AppendParams& params,
                    cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status GatherSlots(CudaContext& context, const KvShape& shape, const LayerView& from,
                         const LayerView& to, std::span<const Position> kept, int64_t kept_per_set,
                         DeviceSpan<const int64_t> seeds, int64_t seed_stride,
                         cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status PromoteSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          const PromoteParams& params, cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status ReleaseSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          int set, std::span<const int32_t> slots, cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
}  // namespace heavywater::cuda
