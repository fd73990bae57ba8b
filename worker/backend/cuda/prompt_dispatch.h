// Which tile runs a prompt: by dtype and head size.
#pragma once

#include "worker/backend/cuda/prompt_tile_fma.h"
#include "worker/backend/cuda/prompt_tile_mma.h"

namespace heavywater::cuda {

template <typename Tile>
struct TileType {
  using type = Tile;
};

template <typename Element, typename Body>
cudaError_t WithMmaTile(int head_dim, const Body& body) {
  if (head_dim <= 64) return body(TileType<MmaTile<Element, 64>>());
  if (head_dim <= 96) return body(TileType<MmaTile<Element, 96>>());
  if (head_dim <= 128) return body(TileType<MmaTile<Element, 128>>());
  return body(TileType<MmaTile<Element, 256>>());
}

// Calls `body` with TileType<the tile>.
template <typename Body>
cudaError_t WithPromptTile(KvDtype dtype, int head_dim, const Body& body) {
  if (dtype == KvDtype::kBFloat16) return WithMmaTile<BFloat16>(head_dim, body);
  if (dtype == KvDtype::kFloat16) return WithMmaTile<Float16>(head_dim, body);
  if (head_dim <= 64) return body(TileType<FmaTile<64>>());
  if (head_dim <= 128) return body(TileType<FmaTile<128>>());
  return body(TileType<FmaTile<256>>());
}

// What both sweeps over a tile need to know.
template <typename Tile>
struct PromptKeys {
  const typename Tile::Stored* keys;  // of the KV head
  const typename Tile::Stored* values;
  int head_dim;
  int num_keys;  // all that the last row sees

  __device__ PromptKeys(const PromptPass& pass, int kv_head)
      : keys(static_cast<const typename Tile::Stored*>(pass.keys) +
             kv_head * pass.capacity * pass.head_dim),
        values(static_cast<const typename Tile::Stored*>(pass.values) +
               kv_head * pass.capacity * pass.head_dim),
        head_dim(pass.head_dim),
        num_keys(pass.first_position + pass.num_tokens) {}

  __device__ void StageKeys(Tile& tile, int first) const {
    tile.StageKeys(keys + static_cast<int64_t>(first) * head_dim, num_keys - first, head_dim);
  }
  __device__ void StageValues(Tile& tile, int first) const {
    tile.StageValues(values + static_cast<int64_t>(first) * head_dim, num_keys - first, head_dim);
  }
};

}  // namespace heavywater::cuda
