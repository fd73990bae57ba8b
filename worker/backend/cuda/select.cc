#include "worker/backend/cuda/select.h"

#include <limits>

#include "cache_service/base/check.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/select_kernels.h"

namespace heavywater::cuda {

absl::Status Select(const SelectParams& params, cudaStream_t stream) {
  HW_CHECK(params.count >= 0 && params.count <= std::numeric_limits<int32_t>::max());
  HW_CHECK(params.kept.size() >= params.num_sets * params.count);
  const SelectionParams& selection = params.selection;
  const SelectKernelParams kernel = {
      .positions = params.positions.device_address(),
      .scores = params.scores.device_address(),
      .kept = params.kept.device_address(),
      .stride = params.stride,
      .budget_tokens = selection.budget_tokens,
      .sink_end = selection.sink_tokens,
      .recent_begin = selection.tokens_seen - selection.recent_tokens,
      .count = static_cast<int32_t>(params.count),
      .num_sets = params.num_sets};
  return HW_CUDA_STATUS(LaunchSelect(kernel, stream));
}

absl::Status CollectVictims(CudaContext& context, const VictimsParams& params,
                            cudaStream_t stream) {
  HW_CHECK(params.victims.size() == params.num_sets * params.max_victims);
  HW_CHECK(params.victim_scores.size() == params.victims.size());
  HW_CHECK(params.used <= params.stride && params.used <= params.kept_stride);
  const VictimsKernelParams kernel = {.positions = params.positions.device_address(),
                                      .scores = params.scores.device_address(),
                                      .kept = params.kept.device_address(),
                                      .victims = params.victims.device_address(),
                                      .victim_scores = params.victim_scores.device_address(),
                                      .fault = context.faults().fault(),
                                      .stride = params.stride,
                                      .kept_stride = params.kept_stride,
                                      .max_victims = params.max_victims,
                                      .used = static_cast<int32_t>(params.used),
                                      .num_sets = params.num_sets};
  return HW_CUDA_STATUS(LaunchCollectVictims(kernel, stream));
}

}  // namespace heavywater::cuda
