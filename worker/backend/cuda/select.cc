#include "worker/backend/cuda/select.h"

namespace heavywater::cuda {
absl::Status Select(const SelectParams& params, cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status CollectVictims(CudaContext& context, const VictimsParams& params,
                            cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
}  // namespace heavywater::cuda
