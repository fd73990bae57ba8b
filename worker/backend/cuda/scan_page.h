// The scan of one page of one KV head by one warp: weights of the queries against
// the page's tables, and integer sums over its codes (backend.h has the formula,
// sketch_shape.h the bytes).
#pragma once

#include <cmath>

#include "worker/backend/cuda/recall_wave.h"
#include "worker/backend/cuda/warp_reduce.h"
#include "worker/backend/cuda/wave_token.h"

namespace heavywater::cuda {

inline constexpr int kScanThreads = kScanWarps * kWarp;
inline constexpr int kLanePositions = 4;                       // consecutive ones
inline constexpr int kStepPositions = kWarp * kLanePositions;  // of a page, at a time
inline constexpr int kCodeBlock = 16;                          // positions of a block of codes
inline constexpr float kLeastWeightProduct = 1e-30f;           // as QuantizeWeights has it
inline constexpr float kLargestExponent = 80;                  // of a share

// Query heads that a lane sums for at once.
constexpr int ScanHeads(int group_size) {
  return group_size <= 1 ? 1 : group_size <= 2 ? 2 : group_size <= 4 ? 4 : 8;
}
constexpr int PaddedGroup(int group_size) {
  const int heads = ScanHeads(group_size);
  return (group_size + heads - 1) / heads * heads;
}

// Of a block, in shared memory. Padding heads have queries 0 and lse infinity: their
// shares are 0.
struct ScanQueries {
  float* values;  // [padded group][head_dim] scaled, chosen channels first
  float* lse;     // [padded group] what estimated logits are relative to
};
// Of a warp: its page.
struct ScanWeights {
  int32_t* words;       // [channels / 4][padded group] of four weights each
  float* constants;     // [padded group] less the lse
  float* units;         // [padded group]
  int32_t* thresholds;  // [padded group]
};

// The page's tables of one KV head.
struct ScanPage {
  const unsigned char* sketch;
  int32_t head_dim;
  int32_t channels;
  int32_t page_tokens;

  __device__ __forceinline__ const uint16_t* Minima() const {
    return reinterpret_cast<const uint16_t*>(sketch + page_tokens * channels / 2);
  }
  __device__ __forceinline__ const uint16_t* Steps() const { return Minima() + channels; }
  __device__ __forceinline__ const uint16_t* Means() const { return Minima() + 2 * channels; }
};

// Constants, units and weights of kHeads query heads.
template <int kHeads>
__device__ __forceinline__ void WeighHeads(const ScanPage& page, const ScanQueries& queries,
                                           int first_head, int padded_group,
                                           const ScanWeights& weights) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* query = queries.values + first_head * page.head_dim;
  float constants[kHeads] = {};
  float maxima[kHeads] = {};
  for (int i = lane; i < page.channels; i += kWarp) {
    const float minimum = HalfToFloat(Load(page.Minima() + i));
    const float step = HalfToFloat(Load(page.Steps() + i));
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float q = query[h * page.head_dim + i];
      constants[h] = fmaf(q, minimum, constants[h]);
      maxima[h] = fmaxf(maxima[h], fabsf(q * step));
    }
  }
  for (int i = lane; i < page.head_dim - page.channels; i += kWarp) {
    const float mean = HalfToFloat(Load(page.Means() + i));
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      constants[h] = fmaf(query[h * page.head_dim + page.channels + i], mean, constants[h]);
    }
  }
  using Sums = ScatteredSums<kWarp, kHeads>;
  Sums::Sum(constants);
  if (lane % Sums::kCopies == 0) {
    const int head = first_head + Sums::FirstSum();
    weights.constants[head] = constants[0] - queries.lse[head];
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // Not negative: ordered as their bits are.
    const float maximum = __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(maxima[h])));
    const bool flat = maximum < kLeastWeightProduct;
    if (lane == 0) weights.units[first_head + h] = flat ? 0.0f : maximum / 127.0f;
    maxima[h] = flat ? 0.0f : 127.0f / maximum;
  }
  auto* bytes = reinterpret_cast<signed char*>(weights.words);
  for (int i = lane; i < page.channels; i += kWarp) {
    const float step = HalfToFloat(Load(page.Steps() + i));
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float product = query[h * page.head_dim + i] * step;
      bytes[(i / 4 * padded_group + first_head + h) * 4 + i % 4] =
          static_cast<signed char>(__float2int_rn(product * maxima[h]));
    }
  }
}

// All heads of the warp's page; the warp may read the results.
template <int kHeads>
__device__ __forceinline__ void WeighPage(const ScanPage& page, const ScanQueries& queries,
                                          int padded_group, const ScanWeights& weights) {
  __syncwarp();  // nobody reads the last page's any more
  for (int head = 0; head < padded_group; head += kHeads) {
    WeighHeads<kHeads>(page, queries, head, padded_group, weights);
  }
  __syncwarp();
}

// Of a lane's positions, from `position` of the page on.
template <int kHeads>
struct LaneSums {
  int values[kHeads][kLanePositions];

  __device__ __forceinline__ void Add(const uint4& codes, int shift, const int32_t* words) {
    const int four[kLanePositions] = {static_cast<int>(codes.x >> shift & 0x0f0f0f0fu),
                                      static_cast<int>(codes.y >> shift & 0x0f0f0f0fu),
                                      static_cast<int>(codes.z >> shift & 0x0f0f0f0fu),
                                      static_cast<int>(codes.w >> shift & 0x0f0f0f0fu)};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int word = words[h];
#pragma unroll
      for (int p = 0; p < kLanePositions; ++p) values[h][p] = __dp4a(four[p], word, values[h][p]);
    }
  }
};

template <int kHeads>
__device__ __forceinline__ LaneSums<kHeads> SumCodes(const ScanPage& page, int position,
                                                     const ScanWeights& weights, int first_head,
                                                     int padded_group) {
  LaneSums<kHeads> sums = {};
  const int groups = page.channels / 8;
  const uint4* codes =
      reinterpret_cast<const uint4*>(page.sketch) +
      (position / kCodeBlock * groups * kCodeBlock + position % kCodeBlock) / kLanePositions;
#pragma unroll 4
  for (int group = 0; group < groups; ++group) {
    const uint4 both = Load(codes + group * (kCodeBlock / kLanePositions));
    const int32_t* words = weights.words + 2 * group * padded_group + first_head;
    sums.Add(both, 0, words);
    sums.Add(both, 4, words + padded_group);
  }
  return sums;
}

// exp(estimated logit - lse).
__device__ __forceinline__ float Share(const ScanWeights& weights, int head, int sum) {
  const float exponent =
      fmaf(weights.units[head], static_cast<float>(sum), weights.constants[head]);
  return expf(fminf(exponent, kLargestExponent));
}

// Copies the wave's record of the item to shared memory; ends with a barrier.
__device__ __forceinline__ void LoadItem(const RecallItem* from, RecallItem& to) {
  constexpr int kWords = sizeof(RecallItem) / sizeof(uint64_t);
  static_assert(sizeof(RecallItem) % sizeof(uint64_t) == 0);
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint64_t*>(&to)[threadIdx.x] =
        Load(reinterpret_cast<const uint64_t*>(from) + threadIdx.x);
  }
  __syncthreads();
}
inline constexpr int kItemSharedBytes = (sizeof(RecallItem) + 15) / 16 * 16;

// The group's queries, scaled, in the order of the sketch's tables. No barrier.
__device__ __forceinline__ void LoadScanQueries(const RecallItem& item, const uint8_t* chosen,
                                                const float* from, int kv_head, int group_size,
                                                int padded_group, int head_dim, float scale,
                                                const ScanQueries& queries) {
  for (int channel = static_cast<int>(threadIdx.x); channel < head_dim; channel += kScanThreads) {
    int below = 0;  // chosen channels below this one
    while (below < item.num_channels && chosen[below] < channel) ++below;
    const bool is_chosen = below < item.num_channels && chosen[below] == channel;
    const int to = is_chosen ? below : item.num_channels + channel - below;
    for (int head = 0; head < padded_group; ++head) {
      const float* query = from + (int64_t{kv_head} * group_size + head) * head_dim;
      queries.values[head * head_dim + to] =
          head < group_size ? Load(query + channel) * scale : 0.0f;
    }
  }
}

}  // namespace heavywater::cuda
