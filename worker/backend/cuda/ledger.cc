#include "worker/backend/cuda/ledger.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/ledger_kernels.h"

namespace heavywater::cuda {

absl::Status CollectGains(const KvShape& shape, const LayerView& layer, DeviceSpan<int64_t> to,
                          cudaStream_t stream) {
  HW_CHECK(to.size() == layer.num_sets * layer.used);
  const GainsParams params = {.gains = layer.gains.device_address(),
                              .to = to.device_address(),
                              .capacity = layer.capacity,
                              .used = layer.used,
                              .num_sets = layer.num_sets,
                              .heads_per_set = layer.num_sets == 1 ? shape.num_kv_heads : 1};
  return HW_CUDA_STATUS(LaunchCollectGains(params, stream));
}

absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int64_t num_rows,
                     int64_t count, cudaStream_t stream) {
  HW_CHECK(from.size() == num_rows * count && to.size() == num_rows);
  return HW_CUDA_STATUS(
      LaunchSumRows(from.device_address(), to.device_address(), num_rows, count, stream));
}

absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from, double decay,
                       cudaStream_t stream) {
  HW_CHECK(from.size() == layer.num_sets * layer.used);
  const ScoresParams params = {.scores = layer.scores.device_address(),
                               .from = from.device_address(),
                               .capacity = layer.capacity,
                               .used = layer.used,
                               .decay = decay,
                               .num_sets = layer.num_sets};
  return HW_CUDA_STATUS(LaunchAddScores(params, stream));
}

absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int num_rows,
                       int64_t count, Pooling pooling, int kernel, cudaStream_t stream) {
  HW_CHECK(from.size() == num_rows * count && to.size() == num_rows * count);
  HW_CHECK(kernel >= 1 && kernel % 2 == 1);
  const int reach = pooling == Pooling::kNone ? 0 : kernel / 2;
  if (reach > kMaxReach) {
    return absl::InvalidArgumentError(
        absl::StrCat("pool kernel is ", kernel, ", want at most ", 2 * kMaxReach + 1));
  }
  const PoolParams params = {.from = from.device_address(),
                             .to = to.device_address(),
                             .count = count,
                             .num_rows = num_rows,
                             .reach = reach,
                             .maximum = pooling == Pooling::kMax};
  return HW_CUDA_STATUS(LaunchPoolVotes(params, stream));
}

}  // namespace heavywater::cuda
