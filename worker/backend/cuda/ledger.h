// Operations on scores (Backend's of these names).
#pragma once

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

absl::Status CollectGains(const KvShape& shape, const LayerView& layer, DeviceSpan<int64_t> to,
                          cudaStream_t stream);
absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int64_t num_rows,
                     int64_t count, cudaStream_t stream);
absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from, double decay,
                       cudaStream_t stream);
absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int num_rows,
                       int64_t count, Pooling pooling, int kernel, cudaStream_t stream);

}  // namespace heavywater::cuda
