// Second sweep of a prompt: column sums of probabilities, without a matrix of
// queries x keys. A block has one tile of keys and goes over scored rows that see any
// of them; their logits come out as in the first sweep, bit for bit.
#include <cmath>

#include "worker/backend/cuda/gain.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/prompt_dispatch.h"

namespace heavywater::cuda {
namespace {

// Tiles of rows of one block: enough to be worth a tile of keys, and enough blocks
// for a window of 32 queries.
constexpr int kTilesPerBlock = 32;

__host__ __device__ __forceinline__ int FirstScoredRow(const PromptPass& pass, int from_position) {
  return max(from_position - pass.first_position, 0) * pass.GroupSize();
}

// What a thread's rows give to its keys.
template <typename Tile>
struct KeyGains {
  int64_t values[Tile::kKeys] = {};

  __device__ __forceinline__ void AddRows(const PromptPass& pass, int kv_head, int first_row,
                                          int first_key,
                                          const float (&logits)[Tile::kRows][Tile::kKeys]) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int row = first_row + Tile::Row(i);
      const int position = row < pass.NumRows() ? pass.PositionOfRow(row) : -1;
      if (position < pass.score_from) continue;
      const SplitSum total = Load(pass.TotalOfRow(kv_head, row));
      const double factor = 1 / total.sum;
      const double pivotal = pass.pivotal_margin / (position + 1);
#pragma unroll
      for (int j = 0; j < Tile::kKeys; ++j) {
        if (first_key + Tile::Key(j) > position) continue;
        values[j] += Gain(expf(logits[i][j] - total.maximum) * factor, pivotal);
      }
    }
  }

  // Over the lanes that share the keys, then to the layer.
  __device__ void Finish(const PromptPass& pass, int kv_head, int first_key) {
    int64_t* gains = pass.gains + kv_head * pass.capacity + first_key;
#pragma unroll
    for (int j = 0; j < Tile::kKeys; ++j) {
#pragma unroll
      for (int offset = kWarp / 2; offset >= Tile::kRowLanes; offset /= 2) {
        values[j] += __shfl_xor_sync(kAllLanes, values[j], offset);
      }
      const bool writes = threadIdx.x % kWarp < Tile::kRowLanes;
      if (writes && values[j] != 0) Add(gains + Tile::Key(j), values[j]);
    }
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) PromptGains(PromptPass pass) {
  Tile tile(SharedMemory());
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kTileKeys;
  const int kv_head = static_cast<int>(blockIdx.y);
  const PromptKeys<Tile> keys(pass, kv_head);
  keys.StageKeys(tile, first_key);
  KeyGains<Tile> gains;
  // Rows before see none of these keys.
  const int first = FirstScoredRow(pass, max(pass.score_from, first_key)) +
                    static_cast<int>(blockIdx.z) * kTilesPerBlock * Tile::kTileRows;
  const int end = min(first + kTilesPerBlock * Tile::kTileRows, pass.NumRows());
  for (int first_row = first; first_row < end; first_row += Tile::kTileRows) {
    __syncthreads();  // the queries before have been used
    tile.StageQueries(pass, kv_head, first_row);
    __syncthreads();
    float logits[Tile::kRows][Tile::kKeys];
    tile.Logits(pass.head_dim, logits);
    gains.AddRows(pass, kv_head, first_row, first_key, logits);
  }
  gains.Finish(pass, kv_head, first_key);
}

}  // namespace

cudaError_t LaunchPromptGains(KvDtype dtype, const PromptPass& pass, cudaStream_t stream) {
  return WithPromptTile(dtype, pass.head_dim, [&](auto type) {
    using Tile = typename decltype(type)::type;
    const int num_keys = pass.first_position + pass.num_tokens;
    const int rows = pass.NumRows() - FirstScoredRow(pass, pass.score_from);
    const int rows_per_block = kTilesPerBlock * Tile::kTileRows;
    if (rows <= 0) return cudaSuccess;
    const dim3 grid((num_keys + Tile::kTileKeys - 1) / Tile::kTileKeys, pass.num_kv_heads,
                    (rows + rows_per_block - 1) / rows_per_block);
    return Launch(PromptGains<Tile>, grid, dim3(Tile::kThreads), Tile::kSharedBytes, stream, pass);
  });
}

}  // namespace heavywater::cuda
