// The scan: of each part of a KV head's pages the best candidates.
#include <cfloat>

#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/scan_block.h"

namespace heavywater::cuda {
namespace {

// The mean over heads is at least `least` only where one head's share is: sums
// below this cannot be. Float errors are far smaller than the margin. Padding heads
// never reach theirs.
__device__ __forceinline__ void SetThresholds(const ScanQueries& queries, int padded_group,
                                              float least, const ScanWeights& weights) {
  for (int head = static_cast<int>(threadIdx.x) % kWarp; head < padded_group; head += kWarp) {
    const float lse = queries.lse[head];
    const float constant = weights.constants[head];
    const float unit = weights.units[head];
    const float margin = 1e-3f + 1e-5f * (fabsf(lse) + fabsf(constant + lse));
    const float needed = logf(least) - margin - constant;
    int threshold = needed > 0 ? 1 : 0;  // all sums are 0
    if (unit != 0) {
      threshold = static_cast<int>(fminf(fmaxf(needed / unit, -1e9f), 1e9f)) - 1;
    }
    weights.thresholds[head] = lse == INFINITY ? 0x7fffffff : threshold;
  }
  __syncwarp();
}

template <int kHeads>
__device__ __forceinline__ bool AnyReaches(const LaneSums<kHeads>& sums, const int* thresholds) {
  bool reached = false;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int p = 0; p < kLanePositions; ++p) reached |= sums.values[h][p] >= thresholds[h];
  }
  return reached;
}

// A lane's candidates, appended to the block's keys.
template <int kHeads>
__device__ __forceinline__ void FindCandidates(const ScanPage& page, const LaneStep& step,
                                               int first_position, int group_size, int padded_group,
                                               float least, const ScanShared& shared) {
  const ScanWeights& weights = shared.weights;
  float values[kLanePositions] = {};
  for (int head = 0; head < padded_group; head += kHeads) {
    const LaneSums<kHeads> sums =
        SumCodes<kHeads>(page, step.position, weights, head, padded_group);
    // Where one pass has all heads, most lanes are done here.
    if (padded_group == kHeads && !AnyReaches(sums, weights.thresholds)) return;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int p = 0; p < kLanePositions; ++p) {
        values[p] += Share(weights, head + h, sums.values[h][p]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kLanePositions; ++p) {
    const float value = values[p] / static_cast<float>(group_size);
    if ((step.bits >> p & 1u) == 0 || !(value >= least)) continue;
    shared.keys[atomicAdd(shared.num_keys, 1)] =
        CandidateKey(value, first_position + step.position + p);
  }
}

// Drops all but the best; later candidates must reach the last of these.
__device__ __forceinline__ void KeepBest(int max_picks, float& least, const ScanShared& shared) {
  const uint64_t* keys = shared.keys;
  const int count = *shared.num_keys;
  const uint64_t cut =
      LeastOfBest([keys](int i) { return keys[i]; }, count, max_picks, *shared.select);
  const int kept = KeepKeys(shared.keys, count, cut, *shared.select);
  least = fmaxf(least, ValueOfKey(cut));
  if (threadIdx.x == 0) *shared.num_keys = kept;
  __syncthreads();
}

template <int kHeads>
__device__ __forceinline__ void ScanPages(const ScanWalk& walk, int head_dim, int group_size,
                                          int padded_group, int max_keys,
                                          const ScanShared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int max_picks = walk.item.max_picks;
  const int steps = (walk.page_tokens + kStepPositions - 1) / kStepPositions;
  float least = walk.item.min_share;
  for (int first = walk.first; first < walk.item.num_pages; first += walk.stride * kScanWarps) {
    const int number = first + warp * walk.stride;
    const ScanPage page = {walk.Sketch(number), head_dim, walk.item.num_channels, walk.page_tokens};
    bool weighed = false;
    for (int i = 0; i < steps; ++i) {
      const LaneStep step = walk.Step(page.sketch, number, i);
      if (__any_sync(kAllLanes, step.bits != 0) != 0) {
        if (!weighed) {
          WeighPage<kHeads>(page, shared.queries, padded_group, shared.weights);
          SetThresholds(shared.queries, padded_group, least, shared.weights);
          weighed = true;
        }
        if (step.bits != 0) {
          FindCandidates<kHeads>(page, step, number * walk.page_tokens, group_size, padded_group,
                                 least, shared);
        }
      }
      __syncthreads();
      const int count = *shared.num_keys;
      __syncthreads();  // all have read it
      if (count > max_keys - kRoundPositions) KeepBest(max_picks, least, shared);
    }
  }
  if (*shared.num_keys > max_picks) KeepBest(max_picks, least, shared);
}

template <int kHeads>
__global__ void __launch_bounds__(kScanThreads, kHeads <= 4 ? 2 : 1)
    ScanKernel(WaveShape shape, const WaveToken* tokens, const SplitSum* totals, RecallWave wave) {
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int padded_group = (group_size + kHeads - 1) / kHeads * kHeads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const ScanShared shared = CutScanShared(SharedMemory(), warp, padded_group, shape.head_dim,
                                          wave.num_channels, wave.max_picks);
  if (threadIdx.x == 0) *shared.num_keys = 0;
  if (!PrepareScan(shape, tokens, wave, totals, padded_group, shared)) return;  // the block
  // A query that sees no slot has nothing to compare with.
  if (shared.item->max_picks > 0 && shared.queries.lse[0] != -INFINITY) {
    ScanPages<kHeads>(WalkOf(shape, shared), shape.head_dim, group_size, padded_group,
                      wave.max_picks + kRoundPositions, shared);
  }
  const int count = *shared.num_keys;
  const int64_t part =
      (static_cast<int64_t>(blockIdx.z) * shape.num_kv_heads + blockIdx.y) * kMaxScanParts +
      blockIdx.x;
  if (threadIdx.x == 0) Store(wave.scratch.num_candidates + part, count);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kScanThreads) {
    Store(wave.scratch.candidates + part * wave.scratch.stride + i, shared.keys[i]);
  }
}

}  // namespace

int64_t ScanSharedBytes(int group_size, int head_dim, int num_channels, int64_t max_picks) {
  return CutScanShared(nullptr, 0, PaddedGroup(group_size), head_dim, num_channels, max_picks)
      .bytes;
}

cudaError_t LaunchScan(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                       const RecallWave& wave, cudaStream_t stream) {
  if (wave.max_picks == 0) return cudaSuccess;
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int heads = ScanHeads(group_size);
  const auto kernel = heads == 1   ? ScanKernel<1>
                      : heads == 2 ? ScanKernel<2>
                      : heads == 4 ? ScanKernel<4>
                                   : ScanKernel<8>;
  const int64_t shared =
      ScanSharedBytes(group_size, shape.head_dim, wave.num_channels, wave.max_picks);
  return Launch(kernel, dim3(wave.parts, shape.num_kv_heads, shape.num_tokens), dim3(kScanThreads),
                shared, stream, shape, tokens, static_cast<const SplitSum*>(scratch.totals), wave);
}

}  // namespace heavywater::cuda
