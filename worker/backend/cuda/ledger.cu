#include "worker/backend/cuda/device_code.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/ledger_kernels.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kLargest = 0x7fffffffffffffff;

unsigned Blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

// A thread per slot; a row of the grid per set.
__global__ void __launch_bounds__(kThreads) collect_gains(GainsParams params) {
  const int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (slot >= params.used) return;
  const int64_t set = blockIdx.y;
  int64_t* gains = params.gains + set * params.heads_per_set * params.capacity + slot;
  int64_t sum = 0;
  for (int head = 0; head < params.heads_per_set; ++head) {
    sum += Load(gains);
    Store(gains, 0);
    gains += params.capacity;
  }
  Store(params.to + set * params.used + slot, sum);
}

// Of integers that are not negative: at most the largest.
__device__ __forceinline__ int64_t AddHeld(int64_t a, int64_t b) {
  return a > kLargest - b ? kLargest : a + b;
}
// Negative once a part is.
__device__ __forceinline__ int64_t Join(int64_t a, int64_t b) {
  return a < 0 || b < 0 ? -1 : AddHeld(a, b);
}

// A block per row.
__global__ void __launch_bounds__(kThreads)
    sum_rows(const int64_t* from, int64_t* to, int64_t count) {
  auto* sums = reinterpret_cast<int64_t*>(SharedMemory());
  const int64_t row = blockIdx.x;
  int64_t sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    sum = Join(sum, Load(from + row * count + i));
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    sum = Join(sum, __shfl_xor_sync(kAllLanes, sum, step));
  }
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum = Join(sum, sums[warp]);
  Store(to + row, sum);
}

// A thread per slot; a row of the grid per set.
__global__ void __launch_bounds__(kThreads) add_scores(ScoresParams params) {
  const int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (slot >= params.used) return;
  const int64_t set = blockIdx.y;
  int64_t* address = params.scores + set * params.capacity + slot;
  int64_t score = Load(address);
  // Half to even, as the host's llrint().
  if (params.decay != 1.0) score = __double2ll_rn(static_cast<double>(score) * params.decay);
  Store(address, score + Load(params.from + set * params.used + slot));
}

// A thread per vote; each is read once by its block.
__global__ void __launch_bounds__(kThreads) pool_votes(PoolParams params) {
  auto* votes = reinterpret_cast<int64_t*>(SharedMemory());
  const int64_t first = int64_t{blockIdx.x} * kThreads - params.reach;
  const int64_t* from = params.from + int64_t{blockIdx.y} * params.count;
  const int width = kThreads + 2 * params.reach;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    const int64_t column = first + i;
    votes[i] = column >= 0 && column < params.count ? Load(from + column) : 0;
  }
  __syncthreads();
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= params.count) return;
  int64_t pooled = votes[threadIdx.x];
  for (int i = 1; i <= 2 * params.reach; ++i) {
    const int64_t vote = votes[threadIdx.x + i];
    pooled = !params.maximum ? pooled + vote : pooled > vote ? pooled : vote;
  }
  Store(params.to + int64_t{blockIdx.y} * params.count + column, pooled);
}

}  // namespace

cudaError_t LaunchCollectGains(const GainsParams& params, cudaStream_t stream) {
  return Launch(collect_gains, dim3(Blocks(params.used), static_cast<unsigned>(params.num_sets)),
                dim3(kThreads), 0, stream, params);
}

cudaError_t LaunchSumRows(const int64_t* from, int64_t* to, int64_t num_rows, int64_t count,
                          cudaStream_t stream) {
  return Launch(sum_rows, dim3(static_cast<unsigned>(num_rows)), dim3(kThreads),
                kWarps * sizeof(int64_t), stream, from, to, count);
}

cudaError_t LaunchAddScores(const ScoresParams& params, cudaStream_t stream) {
  return Launch(add_scores, dim3(Blocks(params.used), static_cast<unsigned>(params.num_sets)),
                dim3(kThreads), 0, stream, params);
}

cudaError_t LaunchPoolVotes(const PoolParams& params, cudaStream_t stream) {
  return Launch(pool_votes, dim3(Blocks(params.count), static_cast<unsigned>(params.num_rows)),
                dim3(kThreads), (kThreads + 2 * params.reach) * sizeof(int64_t), stream, params);
}

}  // namespace heavywater::cuda
