// What one block does to one split: the attention of up to kHeads query rows over
// up to kSplitSlots rows of K and V, each read once. AttendSplits and AttendWhole run it.
//
// A row of K or V is held by kLanes neighbouring lanes, kLaneChannels channels
// each; lanes beyond head_dim idle. What one query row yields does not depend on
// which other rows the block has.
#pragma once

#include <cmath>

#include "worker/backend/cuda/attend_sizes.h"
#include "worker/backend/cuda/kv_row.h"
#include "worker/backend/cuda/warp_reduce.h"

namespace heavywater::cuda {

static_assert(kSplitWarps * kWarp == kSplitThreads);

// Where the rows lie. A source has
//   KvPack<T> Key(int row, int channel) const;    // zeros where it must not be read
//   KvPack<T> Value(int row, int channel) const;  // likewise, and where not seen
//   bool Sees(int row) const;                     // false beyond the last row

template <int kLanes, int kHeads>
struct AttendBlock {
  // Rows that a lane group has in flight, consecutive ones: as many as leave registers
  // for two blocks on a multiprocessor.
  static constexpr int kRowsInFlight = kHeads < 8 ? 4 : 2;
  static_assert(kHeads <= kSplitWarps && kSplitSlots % (kSplitThreads / kLanes) == 0);
  static constexpr int kNumHeads = kHeads;
  static constexpr int kGroups = kSplitThreads / kLanes;
  static constexpr int kStep = kGroups * kRowsInFlight;
  static constexpr int kPaddedDim = kLanes * kLaneChannels;

  // Shared memory: the staged queries, then weights, then the halves' outputs.
  static constexpr int kWeights = kHeads * kSplitSlots;
  static constexpr int kOuts = kSplitWarps / 2 * kHeads * kPaddedDim;
  static constexpr int kSharedFloats = kWeights > kOuts ? kWeights : kOuts;
  static_assert(kSharedFloats >= kHeads * kPaddedDim);

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ static int Group() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ static int Channel() { return Lane() * kLaneChannels; }

  // A lane's channels of all rows, scaled; 0 beyond head_dim and num_heads.
  struct Queries {
    float values[kHeads][kLaneChannels];
  };

  static constexpr int kQueries = kHeads * kPaddedDim;

  // `from` is [num_heads][head_dim], `to` shared memory of kQueries. Ends with a barrier.
  __device__ static void StageQueries(const float* from, int num_heads, int head_dim, float scale,
                                      float* to) {
    for (int i = static_cast<int>(threadIdx.x); i < kQueries; i += kSplitThreads) {
      const int head = i / kPaddedDim;
      const int channel = i % kPaddedDim;
      const bool present = head < num_heads && channel < head_dim;
      to[i] = present ? Load(from + head * head_dim + channel) * scale : 0.0f;
    }
    __syncthreads();
  }
  __device__ __forceinline__ static void ReadQueries(const float* staged, Queries& queries) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float4* row = reinterpret_cast<const float4*>(staged + head * kPaddedDim + Channel());
      const KvPack<float> pack = {row[0], row[1]};
      Unpack(pack, queries.values[head]);
    }
  }

  // logits[head][row] of rows [0, count); of others whatever.
  template <typename T, typename Source>
  __device__ static void Logits(const Source& source, int count, const Queries& queries,
                                float* logits) {
    // As many rows at once as give the sums over lanes 8 values.
    constexpr int kRows = kHeads * kRowsInFlight <= 8 ? kRowsInFlight : 8 / kHeads;
    using Sums = ScatteredSums<kLanes, kRows * kHeads>;
    for (int base = 0; base < count; base += kStep) {
      const int first = base + Group() * kRowsInFlight;
      KvPack<T> packs[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) packs[i] = source.Key(first + i, Channel());
#pragma unroll
      for (int i = 0; i < kRowsInFlight; i += kRows) {
        float sums[kRows * kHeads];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float key[kLaneChannels];
          Unpack(packs[i + r], key);
#pragma unroll
          for (int head = 0; head < kHeads; ++head) {
            sums[r * kHeads + head] = Dot(queries.values[head], key);
          }
        }
        Sums::Sum(sums);
        if (Lane() % Sums::kCopies == 0) {
#pragma unroll
          for (int s = 0; s < Sums::kSumsPerLane; ++s) {
            const int sum = Sums::FirstSum() + s;
            logits[sum % kHeads * kSplitSlots + first + i + sum / kHeads] = sums[s];
          }
        }
      }
    }
  }

  // Logits to weights relative to their maximum, 0 where not seen; a warp for each
  // head. Needs a barrier before, and before the weights are read.
  template <typename Source>
  __device__ static SplitSum Softmax(const Source& source, float* logits) {
    constexpr int kPerLane = kSplitSlots / kWarp;
    const int head = static_cast<int>(threadIdx.x) / kWarp;
    SplitSum result = {0, -INFINITY, 0};
    if (head >= kHeads) return result;  // the whole warp
    float* row = logits + head * kSplitSlots;
    float values[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int slot = i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      values[i] = source.Sees(slot) ? row[slot] : -INFINITY;
      result.maximum = fmaxf(result.maximum, values[i]);
    }
    result.maximum = WarpMax(result.maximum);
    const float shift = result.maximum == -INFINITY ? 0.0f : result.maximum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float weight = expf(values[i] - shift);
      row[i * kWarp + static_cast<int>(threadIdx.x) % kWarp] = weight;
      result.sum += static_cast<double>(weight);
    }
    result.sum = WarpSum(result.sum);
    return result;
  }

  // A lane's channels of the outputs, not normalised.
  struct Outs {
    float values[kHeads][kLaneChannels];
  };

  // The group's share: rows of `count` that it read.
  template <typename T, typename Source>
  __device__ static void Values(const Source& source, int count, const float* weights, Outs& outs) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) outs.values[head][c] = 0;
    }
    for (int base = 0; base < count; base += kStep) {
      const int first = base + Group() * kRowsInFlight;
      KvPack<T> packs[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) packs[i] = source.Value(first + i, Channel());
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        float value[kLaneChannels];
        Unpack(packs[i], value);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float factor = weights[head * kSplitSlots + first + i];
#pragma unroll
          for (int c = 0; c < kLaneChannels; ++c) {
            outs.values[head][c] = fmaf(factor, value[c], outs.values[head][c]);
          }
        }
      }
    }
  }

  // Sums the groups' shares, in an order of their numbers. The result is whole in
  // the lanes of group 0. `shared` is free to use, after a barrier.
  __device__ static void SumGroups(float* shared, Outs& outs) {
#pragma unroll
    for (int offset = kWarp / 2; offset >= kLanes; offset /= 2) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) {
          outs.values[head][c] += __shfl_xor_sync(kAllLanes, outs.values[head][c], offset);
        }
      }
    }
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    for (int half = kSplitWarps / 2; half > 0; half /= 2) {
      const bool writes = warp >= half && warp < 2 * half && Group() * kLanes % kWarp == 0;
      if (writes) StoreShare(outs, shared + (warp - half) * kHeads * kPaddedDim);
      __syncthreads();
      if (warp < half) AddShare(shared + warp * kHeads * kPaddedDim, outs);
      __syncthreads();
    }
  }

  // By group 0: rows of `num_heads` heads, `stride` floats apart.
  __device__ static void StoreOuts(const Outs& outs, int num_heads, int head_dim, float* to,
                                   int64_t stride) {
    if (Group() != 0 || Channel() >= head_dim) return;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= num_heads) break;
      const float(&v)[kLaneChannels] = outs.values[head];
      float4* row = reinterpret_cast<float4*>(to + head * stride + Channel());
      Store(row, make_float4(v[0], v[1], v[2], v[3]));
      Store(row + 1, make_float4(v[4], v[5], v[6], v[7]));
    }
  }

 private:
  __device__ __forceinline__ static float Dot(const float (&a)[kLaneChannels],
                                              const float (&b)[kLaneChannels]) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int c = 1; c < kLaneChannels; ++c) sum = fmaf(a[c], b[c], sum);
    return sum;
  }
  __device__ __forceinline__ static void StoreShare(const Outs& outs, float* to) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float(&v)[kLaneChannels] = outs.values[head];
      float4* row = reinterpret_cast<float4*>(to + head * kPaddedDim + Channel());
      row[0] = make_float4(v[0], v[1], v[2], v[3]);
      row[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }
  __device__ __forceinline__ static void AddShare(const float* from, Outs& outs) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float4* row = reinterpret_cast<const float4*>(from + head * kPaddedDim + Channel());
      const KvPack<float> pack = {row[0], row[1]};
      float share[kLaneChannels];
      Unpack(pack, share);
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) outs.values[head][c] += share[c];
    }
  }
};

// Calls `body` with the AttendBlock that fits: head sizes up to 256, the largest
// power of two of query heads at a time, at most 8.
template <int kLanes, typename Body>
auto WithHeads(int group_size, const Body& body) {
  if (group_size == 1) return body(AttendBlock<kLanes, 1>());
  if (group_size == 2) return body(AttendBlock<kLanes, 2>());
  if (group_size <= 4) return body(AttendBlock<kLanes, 4>());
  return body(AttendBlock<kLanes, 8>());
}
inline constexpr int kMaxHeadDim = 256;
template <typename Body>
auto WithAttendBlock(int head_dim, int group_size, const Body& body) {
  const int dim = PaddedDim(head_dim);
  if (dim == 64) return WithHeads<8>(group_size, body);
  if (dim == 128) return WithHeads<16>(group_size, body);
  return WithHeads<32>(group_size, body);
}

}  // namespace heavywater::cuda
