#include "worker/backend/cuda/ledger.h"

namespace heavywater::cuda {
absl::Status CollectGains(const KvShape& shape, const LayerView& layer, DeviceSpan<int64_t> to,
                          cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int64_t num_rows,
                     int64_t count, cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from, double decay,
                       cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int num_rows,
                       int64_t count, Pooling pooling, int kernel, cudaStream_t stream) {
  return absl::UnimplementedError("soon");
}
}  // namespace heavywater::cuda
