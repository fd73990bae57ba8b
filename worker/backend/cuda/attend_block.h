// What one block does to one split: the attention of up to kHeads query rows over
// up to kSplitSlots rows of K and V, each read once. AttendSplits and AttendWhole run it.
//
// A row of K or V is held by kLanes neighbouring lanes, kChannels channels each; lanes
// beyond head_dim idle. What one query row yields does not depend on
// which other rows the block has.
#pragma once

#include <cmath>

#include "worker/backend/cuda/attend_sizes.h"
#include "worker/backend/cuda/row_pack.h"
#include "worker/backend/cuda/warp_reduce.h"

namespace heavywater::cuda {

static_assert(kSplitWarps * kWarp == kSplitThreads);

// Where the rows lie. A source has
//   auto Key<kChannels>(int row, int channel) const;    // a pack; zeros where not to be read
//   auto Value<kChannels>(int row, int channel) const;  // likewise, and where not seen
//   bool Sees(int row) const;                           // false beyond the last row

template <int kLanes, int kHeads>
struct AttendBlock {
  // Rows that a lane group has in flight, consecutive ones: as many as leave registers
  // for two blocks on a multiprocessor.
  static constexpr int kRowsInFlight = kHeads == 8 ? 2 : 4;
  static_assert(kSplitSlots % (kSplitThreads / kLanes) == 0);
  // A lane's queries, and its outputs, are kHeads * kChannels registers.
  static constexpr int kChannels = kHeads > 8 ? kLaneChannels / 2 : kLaneChannels;
  static constexpr int kNumHeads = kHeads;
  static constexpr int kGroups = kSplitThreads / kLanes;
  static constexpr int kStep = kGroups * kRowsInFlight;
  static constexpr int kPaddedDim = kLanes * kChannels;

  // Shared memory: the staged queries, then weights, then the halves' outputs.
  static constexpr int kWeights = kHeads * kSplitSlots;
  static constexpr int kOuts = kSplitWarps / 2 * kHeads * kPaddedDim;
  static constexpr int kSharedFloats = kWeights > kOuts ? kWeights : kOuts;
  static_assert(kSharedFloats >= kHeads * kPaddedDim);

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ __forceinline__ static int Group() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ static int Channel() { return Lane() * kChannels; }

  template <typename T>
  using Pack = decltype(LoadRow<kChannels>(static_cast<const T*>(nullptr), false));

  // A lane's channels of all rows, scaled; 0 beyond head_dim and num_heads.
  struct Queries {
    float values[kHeads][kChannels];
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
      ReadShared(staged + head * kPaddedDim + Channel(), queries.values[head]);
    }
  }

  // logits[head][row] of rows [0, count); of others whatever.
  template <typename T, typename Source>
  __device__ static void Logits(const Source& source, int count, const Queries& queries,
                                float* logits) {
    // As many rows at once as give the sums over lanes 8 values.
    constexpr int kRows = kHeads * kRowsInFlight <= 8 ? kRowsInFlight : kHeads < 8 ? 8 / kHeads : 1;
    using Sums = ScatteredSums<kLanes, kRows * kHeads>;
    for (int base = 0; base < count; base += kStep) {
      const int first = base + Group() * kRowsInFlight;
      Pack<T> packs[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        packs[i] = source.template Key<kChannels>(first + i, Channel());
      }
#pragma unroll
      for (int i = 0; i < kRowsInFlight; i += kRows) {
        float sums[kRows * kHeads];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float key[kChannels];
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

  // Logits to weights relative to their maximum, 0 where not seen; a warp for each head,
  // which calls done(head, its sum) with all lanes. Needs a barrier before, and before the
  // weights are read.
  template <typename Source, typename Done>
  __device__ static void Softmax(const Source& source, float* logits, const Done& done) {
    for (int head = static_cast<int>(threadIdx.x) / kWarp; head < kHeads; head += kSplitWarps) {
      done(head, SoftmaxOf(source, logits + head * kSplitSlots));
    }
  }

  // A lane's channels of the outputs, not normalised.
  struct Outs {
    float values[kHeads][kChannels];
  };

  // The group's share: rows of `count` that it read.
  template <typename T, typename Source>
  __device__ static void Values(const Source& source, int count, const float* weights, Outs& outs) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) outs.values[head][c] = 0;
    }
    for (int base = 0; base < count; base += kStep) {
      const int first = base + Group() * kRowsInFlight;
      Pack<T> packs[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        packs[i] = source.template Value<kChannels>(first + i, Channel());
      }
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        float value[kChannels];
        Unpack(packs[i], value);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float factor = weights[head * kSplitSlots + first + i];
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
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
        for (int c = 0; c < kChannels; ++c) {
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
      float4* row = reinterpret_cast<float4*>(to + head * stride + Channel());
#pragma unroll
      for (int i = 0; i < kChannels / 4; ++i) Store(row + i, Four(outs.values[head], i));
    }
  }

 private:
  template <typename Source>
  __device__ __forceinline__ static SplitSum SoftmaxOf(const Source& source, float* row) {
    constexpr int kPerLane = kSplitSlots / kWarp;
    SplitSum result = {0, -INFINITY, 0};
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
  __device__ __forceinline__ static float Dot(const float (&a)[kChannels],
                                              const float (&b)[kChannels]) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int c = 1; c < kChannels; ++c) sum = fmaf(a[c], b[c], sum);
    return sum;
  }
  __device__ __forceinline__ static float4 Four(const float (&v)[kChannels], int i) {
    return make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  __device__ __forceinline__ static void ReadShared(const float* from, float (&to)[kChannels]) {
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(from)[i];
      to[4 * i] = four.x;
      to[4 * i + 1] = four.y;
      to[4 * i + 2] = four.z;
      to[4 * i + 3] = four.w;
    }
  }
  __device__ __forceinline__ static void StoreShare(const Outs& outs, float* to) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float4* row = reinterpret_cast<float4*>(to + head * kPaddedDim + Channel());
#pragma unroll
      for (int i = 0; i < kChannels / 4; ++i) row[i] = Four(outs.values[head], i);
    }
  }
  __device__ __forceinline__ static void AddShare(const float* from, Outs& outs) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float share[kChannels];
      ReadShared(from + head * kPaddedDim + Channel(), share);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) outs.values[head][c] += share[c];
    }
  }
};

// Calls `body` with the AttendBlock of HeadsAtOnce() query heads. kLanes: of eight channels.
template <int kLanes, typename Body>
auto WithHeads(int heads, const Body& body) {
  switch (heads) {
    case 1:
      return body(AttendBlock<kLanes, 1>());
    case 2:
      return body(AttendBlock<kLanes, 2>());
    case 4:
      return body(AttendBlock<kLanes, 4>());
  }
  if constexpr (kLanes < kWarp) {
    if (heads == 16) return body(AttendBlock<2 * kLanes, 16>());
  }
  return body(AttendBlock<kLanes, 8>());
}
template <typename Body>
auto WithAttendBlock(int head_dim, int group_size, const Body& body) {
  const int heads = HeadsAtOnce(head_dim, group_size);
  const int dim = PaddedDim(head_dim);
  if (dim == 64) return WithHeads<8>(heads, body);
  if (dim == 128) return WithHeads<16>(heads, body);
  return WithHeads<32>(heads, body);
}

}  // namespace heavywater::cuda
