// A tile of a prompt in bf16 or fp16 on the tensor cores: 64 rows by up to 64 keys.
// Each of 4 warps has 16 rows.
//
// Everything enters as bf16: bf16 K and V as they are, fp16 ones exactly, as the sum
// of two terms. Queries enter as three terms: what is left of a query, 2^-27 of it, is
// below what fp32 itself rounds off. Weights enter as two: at most 2^-18 of each is
// left, so an output is off by at most 2^-18 times the mean of |V| under the row's
// probabilities, 4e-6; sums of weights, and so the gains, use them whole. Sums over
// channels keep the products of the largest terms apart from those of the smaller
// ones, which then lose nothing to the truncation of large sums.
#pragma once

#include <type_traits>

#include "worker/backend/cuda/kv_row.h"
#include "worker/backend/cuda/mma.h"
#include "worker/backend/cuda/prompt_pass.h"

namespace heavywater::cuda {

template <typename Element, int kDim>
class MmaTile {
 public:
  using Stored = Element;
  static constexpr int kThreads = 128;
  static constexpr int kTileRows = 64;
  static constexpr int kKvTerms = std::is_same_v<Element, Float16> ? 2 : 1;
  static constexpr int kTileKeys = (kDim <= 128 ? 64 : 32) / kKvTerms;  // fits shared memory
  static constexpr int kRowLanes = 4;  // neighbouring lanes that share their rows
  static constexpr int kRows = 2;      // of a thread
  static constexpr int kKeys = kTileKeys / kRowLanes;
  static constexpr int kColumns = kDim / kRowLanes;
  // From 128 channels on keys and values take turns in one buffer, so that two blocks
  // fit the shared memory of a multiprocessor of sm_80.
  static constexpr bool kValuesApart = kDim < 128;

  static constexpr int kTerms = 3;  // of a query
  // Padded: the 8 rows and 4 words of a fragment lie in 32 different banks.
  static constexpr int kStride = kDim + 8;
  static constexpr size_t kSharedBytes =
      (kTerms * kTileRows + (kValuesApart ? 2 : 1) * kKvTerms * kTileKeys) * kStride *
      sizeof(uint16_t);

  __device__ explicit MmaTile(unsigned char* shared)
      : queries_(reinterpret_cast<uint16_t*>(shared)),
        keys_(queries_ + kTerms * kTileRows * kStride),
        values_(kValuesApart ? keys_ + kKvTerms * kTileKeys * kStride : keys_) {}

  __device__ __forceinline__ static int Row(int i) {
    return static_cast<int>(threadIdx.x) / kWarp * 16 + FragmentRow() + 8 * i;
  }
  // Of fragment j / 2: two columns.
  __device__ __forceinline__ static int Key(int j) { return j / 2 * 8 + FragmentColumn() + j % 2; }
  // Of fragments 2 p and 2 p + 1: the even and the odd channels of 16.
  __device__ __forceinline__ static int Column(int c) {
    return c / 4 * 16 + 2 * (FragmentColumn() + c % 2) + c / 2 % 2;
  }

  __device__ void StageQueries(const PromptPass& pass, int kv_head, int first) {
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kDim / 2; i += kThreads) {
      const int row = i / (kDim / 2);
      const int channel = i % (kDim / 2) * 2;
      float2 two = make_float2(0, 0);
      if (first + row < pass.NumRows() && channel < pass.head_dim) {
        two = Load(reinterpret_cast<const float2*>(pass.queries +
                                                   pass.Offset(kv_head, first + row) + channel));
      }
      const auto lower = SplitToBFloat16<kTerms>(two.x * pass.scale);
      const auto upper = SplitToBFloat16<kTerms>(two.y * pass.scale);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        uint16_t* to = queries_ + (term * kTileRows + row) * kStride + channel;
        *reinterpret_cast<unsigned*>(to) = PackHalves(lower.bits[term], upper.bits[term]);
      }
    }
  }
  __device__ void StageKeys(const Element* from, int count, int head_dim) {
    StageRows(from, count, head_dim, keys_);
  }
  __device__ void StageValues(const Element* from, int count, int head_dim) {
    StageRows(from, count, head_dim, values_);
  }

  __device__ void Logits(int head_dim, float (&logits)[kRows][kKeys]) const {
    float large[kTileKeys / 8][4] = {};
    float small[kTileKeys / 8][4] = {};
#pragma unroll 1
    for (int channel = 0; channel < head_dim; channel += 16) {
      unsigned a[kTerms][4];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) LoadQueries(term, channel, a[term]);
#pragma unroll
      for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
        for (int of_key = kKvTerms - 1; of_key >= 0; --of_key) {
          const uint16_t* key = keys_ + (of_key * kTileKeys + n * 8 + FragmentRow()) * kStride +
                                channel + FragmentColumn();
          const unsigned b0 = Word(key);
          const unsigned b1 = Word(key + 8);
#pragma unroll
          for (int term = kTerms - 1 - of_key; term >= 0; --term) {
            MultiplyAdd(a[term], b0, b1, term + of_key == 0 ? large[n] : small[n]);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      logits[0][j] = large[j / 2][j % 2] + small[j / 2][j % 2];
      logits[1][j] = large[j / 2][2 + j % 2] + small[j / 2][2 + j % 2];
    }
  }

  // The weights of two fragments of keys are the left operand as they lie.
  __device__ void AddValues(const float (&weights)[kRows][kKeys], int head_dim,
                            float (&outs)[kRows][kColumns]) const {
#pragma unroll
    for (int key = 0; key < kTileKeys; key += 16) {
      unsigned large[4];
      unsigned small[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&row)[kKeys] = weights[i % 2];
        const int j = key / 4 + i / 2 * 2;
        const auto lower = SplitToBFloat16<2>(row[j]);
        const auto upper = SplitToBFloat16<2>(row[j + 1]);
        large[i] = PackHalves(lower.bits[0], upper.bits[0]);
        small[i] = PackHalves(lower.bits[1], upper.bits[1]);
      }
#pragma unroll
      for (int channel = 0; channel < kDim; channel += 16) {
        if (channel >= head_dim) break;
#pragma unroll
        for (int term = kKvTerms - 1; term >= 0; --term) {
          AddValuesOf16(large, small, term * kTileKeys + key, channel, outs);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static int FragmentRow() {
    return static_cast<int>(threadIdx.x) % kWarp / 4;
  }
  __device__ __forceinline__ static int FragmentColumn() {
    return static_cast<int>(threadIdx.x) % 4 * 2;
  }
  __device__ __forceinline__ static unsigned Word(const uint16_t* from) {
    return *reinterpret_cast<const unsigned*>(from);
  }

  __device__ static void StageRows(const Element* from, int count, int head_dim, uint16_t* to) {
    constexpr int kPacks = kDim / kLaneChannels;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * kPacks; i += kThreads) {
      const int row = i / kPacks;
      const int channel = i % kPacks * kLaneChannels;
      KvPack<Element> pack = {make_uint4(0, 0, 0, 0)};
      if (row < count && channel < head_dim) {
        pack.words = Load(reinterpret_cast<const uint4*>(from + row * head_dim + channel));
      }
      uint16_t* at = to + row * kStride + channel;
      if constexpr (kKvTerms == 1) {
        *reinterpret_cast<uint4*>(at) = pack.words;
      } else {
        StoreTerms(pack, at);
      }
    }
  }
  // Exact: 11 bits of fp16 are 8 and 3 of bf16.
  __device__ __forceinline__ static void StoreTerms(const KvPack<Element>& pack, uint16_t* to) {
    float values[kLaneChannels];
    Unpack(pack, values);
#pragma unroll
    for (int c = 0; c < kLaneChannels; c += 2) {
      const auto lower = SplitToBFloat16<2>(values[c]);
      const auto upper = SplitToBFloat16<2>(values[c + 1]);
#pragma unroll
      for (int term = 0; term < 2; ++term) {
        *reinterpret_cast<unsigned*>(to + term * kTileKeys * kStride + c) =
            PackHalves(lower.bits[term], upper.bits[term]);
      }
    }
  }

  __device__ __forceinline__ void LoadQueries(int term, int channel, unsigned (&a)[4]) const {
    const int row = static_cast<int>(threadIdx.x) / kWarp * 16 + FragmentRow();
    const uint16_t* from =
        queries_ + (term * kTileRows + row) * kStride + channel + FragmentColumn();
    a[0] = Word(from);
    a[1] = Word(from + 8 * kStride);
    a[2] = Word(from + 8);
    a[3] = Word(from + 8 * kStride + 8);
  }

  // 16 keys by 16 channels, from row `key` of the values' terms. A word holds two neighbouring
  // channels of a key, an operand two keys of a channel: one fragment gets the even, one the odd
  // channels.
  __device__ __forceinline__ void AddValuesOf16(const unsigned (&large)[4],
                                                const unsigned (&small)[4], int key, int channel,
                                                float (&outs)[kRows][kColumns]) const {
    const uint16_t* from =
        values_ + (key + FragmentColumn()) * kStride + channel + 2 * FragmentRow();
    const unsigned first[2] = {Word(from), Word(from + 8 * kStride)};
    const unsigned second[2] = {Word(from + kStride), Word(from + 9 * kStride)};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const unsigned halves = odd == 0 ? 0x5410u : 0x7632u;
      const unsigned b0 = __byte_perm(first[0], second[0], halves);
      const unsigned b1 = __byte_perm(first[1], second[1], halves);
      const int column = channel / 4 + 2 * odd;
      float c[4] = {outs[0][column], outs[0][column + 1], outs[1][column], outs[1][column + 1]};
      MultiplyAdd(small, b0, b1, c);
      MultiplyAdd(large, b0, b1, c);
      outs[0][column] = c[0];
      outs[0][column + 1] = c[1];
      outs[1][column] = c[2];
      outs[1][column + 1] = c[3];
    }
  }

  uint16_t* queries_;  // [kTerms][kTileRows][kStride]
  uint16_t* keys_;     // [kKvTerms][kTileKeys][kStride]
  uint16_t* values_;   // likewise
};

}  // namespace heavywater::cuda
