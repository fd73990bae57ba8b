// Whom a choice gave up, in ascending order of slots.
#include "worker/backend/cuda/block_sum.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/select_kernels.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 1024;

// A block per set, slot by slot in tiles of a block.
__global__ void __launch_bounds__(kThreads) collect_victims(VictimsKernelParams params) {
  int* partial = reinterpret_cast<int*>(SharedMemory());
  const int64_t set = blockIdx.x;
  int64_t count = 0;
  for (int first = 0; first < params.used; first += kThreads) {
    const int slot = first + static_cast<int>(threadIdx.x);
    const bool goes = slot < params.used &&
                      Load(params.positions + set * params.stride + slot) >= 0 &&
                      Load(params.kept + set * params.kept_stride + slot) == 0;
    int in_tile = 0;
    const int64_t at = count + CountBefore(goes, partial, in_tile);
    if (goes && at < params.max_victims) {
      Store(params.victims + set * params.max_victims + at, slot);
      Store(params.victim_scores + set * params.max_victims + at,
            Load(params.scores + set * params.stride + slot));
    }
    count += in_tile;
  }
  for (int64_t i = count + threadIdx.x; i < params.max_victims; i += kThreads) {
    Store(params.victims + set * params.max_victims + i, -1);
    Store(params.victim_scores + set * params.max_victims + i, 0);
  }
  if (count > params.max_victims && threadIdx.x == 0) {
    const Fault fault = {FaultKind::kTooManyVictims, static_cast<int32_t>(set), params.max_victims};
    uint4 words;
    memcpy(&words, &fault, sizeof(words));
    StoreHost(reinterpret_cast<uint4*>(params.fault), words);
  }
}

}  // namespace

cudaError_t LaunchCollectVictims(const VictimsKernelParams& params, cudaStream_t stream) {
  return Launch(collect_victims, dim3(static_cast<unsigned>(params.num_sets)), dim3(kThreads),
                kWarp * sizeof(int), stream, params);
}

}  // namespace heavywater::cuda
