// The second scan: the estimated mass of demoted positions that were not picked.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/scan_block.h"

namespace heavywater::cuda {
namespace {

// A KV head's picks, ascending.
struct PickList {
  const int32_t* picks;
  int32_t count;

  // Clears the bits of positions that were picked.
  __device__ __forceinline__ unsigned Unpicked(unsigned bits, int position) const {
    int first = 0;
    int end = count;
    while (first < end) {
      const int middle = (first + end) / 2;
      if (Load(picks + middle) < position) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    for (; first < count; ++first) {
      const int offset = Load(picks + first) - position;
      if (offset >= kLanePositions) break;
      bits &= ~(1u << offset);
    }
    return bits;
  }
};

template <int kHeads>
struct LaneMass {
  double of_heads[kHeads] = {};

  __device__ __forceinline__ void Add(const ScanPage& page, const LaneStep& step,
                                      const ScanWeights& weights, int first_head,
                                      int padded_group) {
    const LaneSums<kHeads> sums =
        SumCodes<kHeads>(page, step.position, weights, first_head, padded_group);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int p = 0; p < kLanePositions; ++p) {
        const float share = Share(weights, first_head + h, sums.values[h][p]);
        if ((step.bits >> p & 1u) != 0) of_heads[h] += static_cast<double>(share);
      }
    }
  }
  // Nothing was attended: whatever is left out is all of it.
  __device__ __forceinline__ void SetInfinite() {
#pragma unroll
    for (double& mass : of_heads) mass = INFINITY;
  }
};

// Of kHeads heads over the part's pages.
template <int kHeads>
__device__ __forceinline__ LaneMass<kHeads> SumPages(const ScanWalk& walk, const PickList& picks,
                                                     int head_dim, int first_head, int padded_group,
                                                     const ScanShared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int steps = (walk.page_tokens + kStepPositions - 1) / kStepPositions;
  const bool attended = shared.queries.lse[0] != -INFINITY;
  LaneMass<kHeads> mass;
  for (int first = walk.first; first < walk.item.num_pages; first += walk.stride * kScanWarps) {
    const int number = first + warp * walk.stride;
    const ScanPage page = {walk.Sketch(number), head_dim, walk.item.num_channels, walk.page_tokens};
    bool weighed = false;
    for (int i = 0; i < steps; ++i) {
      LaneStep step = walk.Step(page.sketch, number, i);
      if (step.bits != 0) {
        step.bits = picks.Unpicked(step.bits, number * walk.page_tokens + step.position);
      }
      if (__any_sync(kAllLanes, step.bits != 0) == 0) continue;
      if (attended && !weighed) {
        __syncwarp();
        WeighHeads<kHeads>(page, shared.queries, first_head, padded_group, shared.weights);
        __syncwarp();
        weighed = true;
      }
      if (step.bits == 0) continue;
      if (attended) {
        mass.Add(page, step, shared.weights, first_head, padded_group);
      } else {
        mass.SetInfinite();
      }
    }
  }
  return mass;
}

// Over the block, in an order that depends on nothing but the threads.
template <int kHeads>
__device__ __forceinline__ void StoreMass(const LaneMass<kHeads>& mass, int num_heads,
                                          double* shared, double* to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const double sum = WarpSum(mass.of_heads[h]);
    if (lane == 0) shared[warp * kHeads + h] = sum;
  }
  __syncthreads();
  const int head = static_cast<int>(threadIdx.x);
  if (head < num_heads) {
    double sum = 0;
    for (int i = 0; i < kScanWarps; ++i) sum += shared[i * kHeads + head];
    Store(to + int64_t{head} * kMaxScanParts, sum);
  }
  __syncthreads();
}

template <int kHeads>
__global__ void __launch_bounds__(kScanThreads, kHeads <= 4 ? 2 : 1)
    MissingKernel(WaveShape shape, const WaveToken* tokens, WaveScratch scratch, RecallWave wave) {
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int padded_group = (group_size + kHeads - 1) / kHeads * kHeads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const ScanShared shared = CutScanShared(SharedMemory(), warp, padded_group, shape.head_dim,
                                          wave.num_channels, /*max_picks=*/0);
  if (!PrepareScan(shape, tokens, wave, scratch.totals, padded_group, shared)) return;  // the block
  if (shared.item->report_missing == 0) return;
  const int64_t list = static_cast<int64_t>(blockIdx.z) * shape.num_kv_heads + blockIdx.y;
  const PickList picks = {scratch.picks + list * scratch.max_picks, Load(scratch.num_picks + list)};
  const ScanWalk walk = WalkOf(shape, shared);
  const int64_t row = static_cast<int64_t>(blockIdx.z) * shape.num_query_heads +
                      static_cast<int64_t>(blockIdx.y) * group_size;
  for (int head = 0; head < padded_group; head += kHeads) {
    const LaneMass<kHeads> mass =
        SumPages<kHeads>(walk, picks, shape.head_dim, head, padded_group, shared);
    StoreMass(mass, min(group_size - head, kHeads), shared.masses,
              wave.scratch.masses + (row + head) * kMaxScanParts + blockIdx.x);
  }
}

}  // namespace

cudaError_t LaunchMissingScan(const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream) {
  if (wave.any_missing == 0) return cudaSuccess;
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int heads = ScanHeads(group_size);
  const auto kernel = heads == 1   ? MissingKernel<1>
                      : heads == 2 ? MissingKernel<2>
                      : heads == 4 ? MissingKernel<4>
                                   : MissingKernel<8>;
  const int64_t shared = ScanSharedBytes(group_size, shape.head_dim, wave.num_channels, 0);
  return Launch(kernel, dim3(wave.parts, shape.num_kv_heads, shape.num_tokens), dim3(kScanThreads),
                shared, stream, shape, tokens, scratch, wave);
}

}  // namespace heavywater::cuda
