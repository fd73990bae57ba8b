// A tile of an fp32 prompt: 64 rows by 64 keys (32 at head sizes above 128), on
// the fp32 units. Threads form a grid of 16 by 16, each with 4 rows.
#pragma once

#include "worker/backend/cuda/kv_row.h"
#include "worker/backend/cuda/prompt_pass.h"

namespace heavywater::cuda {

template <int kDim>
class FmaTile {
 public:
  using Stored = float;
  static constexpr int kThreads = 256;
  static constexpr int kTileRows = 64;
  static constexpr int kTileKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kRowLanes = 16;  // neighbouring lanes that share their rows
  static constexpr int kRows = 4;       // of a thread
  static constexpr int kKeys = kTileKeys / kRowLanes;
  static constexpr int kColumns = kDim / kRowLanes;
  // Keys and values take turns in one buffer.
  static constexpr bool kValuesApart = false;

  // Padded: 16 rows at one channel lie in 16 different groups of banks.
  static constexpr int kStride = kDim + 4;
  static constexpr int kWeightStride = kTileKeys + 4;
  static constexpr size_t kSharedBytes =
      ((kTileRows + kTileKeys) * kStride + kTileRows * kWeightStride) * sizeof(float);

  __device__ explicit FmaTile(unsigned char* shared)
      : queries_(reinterpret_cast<float*>(shared)),
        rows_(queries_ + kTileRows * kStride),
        weights_(rows_ + kTileKeys * kStride) {}

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % kRowLanes; }
  __device__ __forceinline__ static int Row(int i) {
    return static_cast<int>(threadIdx.x) / kRowLanes * kRows + i;
  }
  __device__ __forceinline__ static int Key(int j) { return Lane() + kRowLanes * j; }
  __device__ __forceinline__ static int Column(int c) {
    return c / 4 * 4 * kRowLanes + Lane() * 4 + c % 4;
  }

  // Rows [first, first + kTileRows) of the pass, scaled; beyond the last 0.
  __device__ void StageQueries(const PromptPass& pass, int kv_head, int first) {
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kDim / 4; i += kThreads) {
      const int row = i / (kDim / 4);
      const int channel = i % (kDim / 4) * 4;
      float4 four = make_float4(0, 0, 0, 0);
      if (first + row < pass.NumRows() && channel < pass.head_dim) {
        four = Load(reinterpret_cast<const float4*>(pass.queries +
                                                    pass.Offset(kv_head, first + row) + channel));
      }
      *reinterpret_cast<float4*>(queries_ + row * kStride + channel) = make_float4(
          four.x * pass.scale, four.y * pass.scale, four.z * pass.scale, four.w * pass.scale);
    }
  }

  // `count` rows of K; zeros beyond.
  __device__ void StageKeys(const float* from, int count, int head_dim) {
    for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * kDim / 4; i += kThreads) {
      const int row = i / (kDim / 4);
      const int channel = i % (kDim / 4) * 4;
      float4 four = make_float4(0, 0, 0, 0);
      if (row < count && channel < head_dim) {
        four = Load(reinterpret_cast<const float4*>(from + row * head_dim + channel));
      }
      *reinterpret_cast<float4*>(rows_ + row * kStride + channel) = four;
    }
  }
  __device__ void StageValues(const float* from, int count, int head_dim) {
    StageKeys(from, count, head_dim);
  }

  // The same sums in the same order whichever rows share the tile.
  __device__ void Logits(int head_dim, float (&logits)[kRows][kKeys]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) logits[i][j] = 0;
    }
#pragma unroll 1
    for (int channel = 0; channel < head_dim; channel += 4) {
      float4 keys[kKeys];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) keys[j] = Four(rows_ + Key(j) * kStride + channel);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 query = Four(queries_ + Row(i) * kStride + channel);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          float& sum = logits[i][j];
          sum = fmaf(query.x, keys[j].x, sum);
          sum = fmaf(query.y, keys[j].y, sum);
          sum = fmaf(query.z, keys[j].z, sum);
          sum = fmaf(query.w, keys[j].w, sum);
        }
      }
    }
  }

  // outs += weights * values, in ascending order of keys. Weights pass through
  // shared memory within the warp.
  __device__ void AddValues(const float (&weights)[kRows][kKeys], int head_dim,
                            float (&outs)[kRows][kColumns]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) weights_[Row(i) * kWeightStride + Key(j)] = weights[i][j];
    }
    __syncwarp();
#pragma unroll 1
    for (int key = 0; key < kTileKeys; key += 4) {
      float factors[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 four = Four(weights_ + Row(i) * kWeightStride + key);
        factors[i][0] = four.x;
        factors[i][1] = four.y;
        factors[i][2] = four.z;
        factors[i][3] = four.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 4) {
          const float4 value = Four(rows_ + (key + k) * kStride + Column(c));
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            outs[i][c] = fmaf(factors[i][k], value.x, outs[i][c]);
            outs[i][c + 1] = fmaf(factors[i][k], value.y, outs[i][c + 1]);
            outs[i][c + 2] = fmaf(factors[i][k], value.z, outs[i][c + 2]);
            outs[i][c + 3] = fmaf(factors[i][k], value.w, outs[i][c + 3]);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static float4 Four(const float* from) {
    return *reinterpret_cast<const float4*>(from);
  }

  float* queries_;  // [kTileRows][kStride]
  float* rows_;     // [kTileKeys][kStride], keys or values
  float* weights_;  // [kTileRows][kWeightStride]
};

}  // namespace heavywater::cuda
