// What follows the splits: their totals, the outputs, and the gains.
#include <cmath>

#include "worker/backend/cuda/attend.h"
#include "worker/backend/cuda/attend_parts.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/wave_token.h"

namespace heavywater::cuda {
namespace {

// Of the kernels that have a block, or a warp, for each query row.
constexpr int kRowThreads = 128;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kMaxChannelsPerLane = 8;  // head sizes up to 256
constexpr int kGainThreads = kSplitSlots / 4;

__device__ __forceinline__ int64_t RowOfWarp() {
  return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp;
}

__global__ void __launch_bounds__(kRowThreads)
    SlotTotals(WaveShape shape, const WaveToken* tokens, WaveScratch scratch) {
  const int64_t row = RowOfWarp();
  if (row >= static_cast<int64_t>(shape.num_tokens) * shape.num_query_heads) return;  // the warp
  const WaveToken& token = tokens[row / shape.num_query_heads];
  const int used = Load(&token.used);
  const SplitSum total = PartsOfRow(scratch, row, used, /*picks=*/false).Total();
  if (LaneOfWarp() == 0) Store(scratch.totals + row, total);
}

// A lane's channels, four at a time.
struct LaneOut {
  float4 values[kMaxChannelsPerLane / 4];
};

__device__ __forceinline__ void AddScaled(const float* from, int head_dim, float factor,
                                          LaneOut& out) {
#pragma unroll
  for (int i = 0; i < kMaxChannelsPerLane / 4; ++i) {
    const int channel = (i * kWarp + LaneOfWarp()) * 4;
    if (channel >= head_dim) continue;
    const float4 part = Load(reinterpret_cast<const float4*>(from + channel));
    out.values[i].x = fmaf(factor, part.x, out.values[i].x);
    out.values[i].y = fmaf(factor, part.y, out.values[i].y);
    out.values[i].z = fmaf(factor, part.z, out.values[i].z);
    out.values[i].w = fmaf(factor, part.w, out.values[i].w);
  }
}

// The warp's share: every kRowWarps-th part, in ascending order. Where a factor is 0
// nothing need have been written.
__device__ __forceinline__ LaneOut MergeShare(const RowParts& parts, const SplitSum& total,
                                              const float* outs, int head_dim) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_mine = (parts.num_parts - warp + kRowWarps - 1) / kRowWarps;
  LaneOut out = {};
  for (int first = 0; first < num_mine; first += kWarp) {
    const int part = warp + (first + LaneOfWarp()) * kRowWarps;
    const float factor =
        part < parts.num_parts ? static_cast<float>(Factor(parts.Sum(part), total)) : 0.0f;
    const int count = min(num_mine - first, kWarp);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float of_part = __shfl_sync(kAllLanes, factor, i);
      const int index = parts.Index(warp + (first + i) * kRowWarps);
      if (of_part != 0) {
        AddScaled(outs + static_cast<int64_t>(index) * head_dim, head_dim, of_part, out);
      }
    }
  }
  return out;
}

// A block for each row: the order of its sums depends on the number of parts only.
__global__ void __launch_bounds__(kRowThreads)
    Merge(WaveShape shape, const WaveToken* tokens, WaveScratch scratch) {
  WaveToken& token = *reinterpret_cast<WaveToken*>(SharedMemory());
  SplitSum& total = *reinterpret_cast<SplitSum*>(SharedMemory() + kTokenSharedBytes);
  float* shares = reinterpret_cast<float*>(&total + 1);
  const int64_t row = blockIdx.x;
  LoadToken(tokens + row / shape.num_query_heads, token);
  const RowParts parts = PartsOfRow(scratch, row, token.used, /*picks=*/token.recall >= 0);
  if (threadIdx.x < kWarp) {
    const SplitSum sum = parts.Total();
    if (LaneOfWarp() == 0) {
      total = sum;
      Store(scratch.totals + row, sum);
    }
  }
  __syncthreads();
  const LaneOut share = MergeShare(
      parts, total, scratch.outs + row * (scratch.splits + 1) * shape.head_dim, shape.head_dim);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < kMaxChannelsPerLane / 4; ++i) {
    const int channel = (i * kWarp + LaneOfWarp()) * 4;
    if (channel >= shape.head_dim) continue;
    *reinterpret_cast<float4*>(shares + warp * shape.head_dim + channel) = share.values[i];
  }
  __syncthreads();
  float* to = token.out + row % shape.num_query_heads * shape.head_dim;
  for (int channel = static_cast<int>(threadIdx.x); channel < shape.head_dim;
       channel += kRowThreads) {
    float sum = shares[channel];
#pragma unroll
    for (int i = 1; i < kRowWarps; ++i) sum += shares[i * shape.head_dim + channel];
    Store(to + channel, sum);
  }
}

// A block for each split of a KV head; a thread for four of its slots.
__global__ void __launch_bounds__(kGainThreads)
    AddGains(WaveShape shape, const WaveToken* tokens, WaveScratch scratch) {
  WaveToken& token = *reinterpret_cast<WaveToken*>(SharedMemory());
  double* factors = reinterpret_cast<double*>(SharedMemory() + kTokenSharedBytes);
  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  LoadToken(tokens + blockIdx.z, token);
  if (token.gains == nullptr || split >= NumSplits(token.used)) return;  // the whole block

  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.z) * shape.num_query_heads + kv_head * group_size;
  for (int head = static_cast<int>(threadIdx.x); head < group_size; head += kGainThreads) {
    factors[head] = Factor(Load(scratch.sums + (row + head) * (scratch.splits + 1) + split),
                           Load(scratch.totals + row + head));
  }
  __syncthreads();
  const int slot = split * kSplitSlots + static_cast<int>(threadIdx.x) * 4;
  if (slot >= token.used) return;
  const int64_t stride = static_cast<int64_t>(scratch.splits) * kSplitSlots;
  FourGains gains = {};
#pragma unroll 4
  for (int head = 0; head < group_size; ++head) {
    const float* weights = scratch.weights + (row + head) * stride + slot;
    AddProbabilities(Load(reinterpret_cast<const float4*>(weights)), factors[head], token.pivotal,
                     gains);
  }
  AddToGains(gains, token.gains + kv_head * token.capacity + slot);
}

int64_t NumRows(const WaveShape& shape) {
  return static_cast<int64_t>(shape.num_tokens) * shape.num_query_heads;
}

}  // namespace

cudaError_t LaunchSlotTotals(const WaveShape& shape, const WaveToken* tokens,
                             const WaveScratch& scratch, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((NumRows(shape) + kRowWarps - 1) / kRowWarps));
  return Launch(SlotTotals, grid, dim3(kRowThreads), 0, stream, shape, tokens, scratch);
}

cudaError_t LaunchMerge(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                        cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(NumRows(shape)));
  const size_t shared_bytes =
      kTokenSharedBytes + sizeof(SplitSum) + kRowWarps * shape.head_dim * sizeof(float);
  return Launch(Merge, grid, dim3(kRowThreads), shared_bytes, stream, shape, tokens, scratch);
}

cudaError_t LaunchAddGains(const WaveShape& shape, const WaveToken* tokens,
                           const WaveScratch& scratch, cudaStream_t stream) {
  const dim3 grid(scratch.splits, shape.num_kv_heads, shape.num_tokens);
  const size_t group_size = shape.num_query_heads / shape.num_kv_heads;
  return Launch(AddGains, grid, dim3(kGainThreads), kTokenSharedBytes + group_size * sizeof(double),
                stream, shape, tokens, scratch);
}

}  // namespace heavywater::cuda
