// First sweep of a prompt: outputs by online softmax. A block has one tile of rows
// and goes over the tiles of keys that they see.
#include <cmath>

#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/prompt_dispatch.h"

namespace heavywater::cuda {
namespace {

template <int kLanes>
__device__ __forceinline__ float MaxOverLanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}
template <int kLanes>
__device__ __forceinline__ float SumOverLanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// A thread's rows: all lanes of a row hold the same.
template <typename Tile>
struct RowState {
  float outs[Tile::kRows][Tile::kColumns];  // relative to `maximum`
  float maximum[Tile::kRows];
  double sum[Tile::kRows];
  int position[Tile::kRows];  // -1: no such row, it sees nothing

  __device__ RowState(const PromptPass& pass, int first_row) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) outs[i][c] = 0;
      maximum[i] = -INFINITY;
      sum[i] = 0;
      const int row = first_row + Tile::Row(i);
      position[i] = row < pass.NumRows() ? pass.PositionOfRow(row) : -1;
    }
  }

  // Logits of the tile at `first_key` to weights, relative to the maximum so far. A
  // tile of which a row sees nothing changes none of its bits.
  __device__ __forceinline__ void AddWeights(int first_key,
                                             float (&logits)[Tile::kRows][Tile::kKeys]) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      float largest = maximum[i];
#pragma unroll
      for (int j = 0; j < Tile::kKeys; ++j) {
        if (first_key + Tile::Key(j) > position[i]) logits[i][j] = -INFINITY;
        largest = fmaxf(largest, logits[i][j]);
      }
      largest = MaxOverLanes<Tile::kRowLanes>(largest);
      const float shift = largest == -INFINITY ? 0.0f : largest;
      float weights = 0;
#pragma unroll
      for (int j = 0; j < Tile::kKeys; ++j) {
        logits[i][j] = expf(logits[i][j] - shift);
        weights += logits[i][j];
      }
      const float factor = expf(maximum[i] - shift);
      maximum[i] = largest;
      sum[i] = sum[i] * factor + SumOverLanes<Tile::kRowLanes>(weights);
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) outs[i][c] *= factor;
    }
  }

  __device__ void Finish(const PromptPass& pass, int kv_head, int first_row) const {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      if (position[i] < 0) continue;
      const int row = first_row + Tile::Row(i);
      const float factor = static_cast<float>(1 / sum[i]);
      float* out = pass.out + pass.Offset(kv_head, row);
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        if (Tile::Column(c) < pass.head_dim) Store(out + Tile::Column(c), outs[i][c] * factor);
      }
      if (threadIdx.x % Tile::kRowLanes == 0) {
        Store(pass.TotalOfRow(kv_head, row), SplitSum{sum[i], maximum[i], 0});
      }
    }
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) PromptAttend(PromptPass pass) {
  Tile tile(SharedMemory());
  // The last rows see most: they begin first.
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tile::kTileRows;
  const int kv_head = static_cast<int>(blockIdx.y);
  const PromptKeys<Tile> keys(pass, kv_head);
  RowState<Tile> rows(pass, first_row);
  tile.StageQueries(pass, kv_head, first_row);
  const int last_row = min(first_row + Tile::kTileRows, pass.NumRows()) - 1;
  const int visible = pass.PositionOfRow(last_row) + 1;
  for (int first_key = 0; first_key < visible; first_key += Tile::kTileKeys) {
    __syncthreads();  // the tile before has been used
    keys.StageKeys(tile, first_key);
    if constexpr (Tile::kValuesApart) keys.StageValues(tile, first_key);
    __syncthreads();
    float weights[Tile::kRows][Tile::kKeys];
    tile.Logits(pass.head_dim, weights);
    rows.AddWeights(first_key, weights);
    if constexpr (!Tile::kValuesApart) {
      __syncthreads();
      keys.StageValues(tile, first_key);
      __syncthreads();
    }
    tile.AddValues(weights, pass.head_dim, rows.outs);
  }
  rows.Finish(pass, kv_head, first_row);
}

}  // namespace

cudaError_t LaunchPromptAttend(KvDtype dtype, const PromptPass& pass, cudaStream_t stream) {
  return WithPromptTile(dtype, pass.head_dim, [&](auto type) {
    using Tile = typename decltype(type)::type;
    const dim3 grid((pass.NumRows() + Tile::kTileRows - 1) / Tile::kTileRows, pass.num_kv_heads);
    return Launch(PromptAttend<Tile>, grid, dim3(Tile::kThreads), Tile::kSharedBytes, stream, pass);
  });
}

}  // namespace heavywater::cuda
