// Exact prompt attention of one tile of query rows over packed keys and values.
#pragma once

#include <cstdint>

#include "worker/backend/cpu/target.h"

namespace heavywater {

// Query rows of a tile: 2 x 12 on AVX-512, 4 x 6 on AVX2, each with two vectors
// of accumulators per row in registers.
inline constexpr int kTileRows = 24;
// Keys, and columns of values, of a packed panel: whole pairs of vectors.
inline constexpr int kPanelWidth = 32;

inline int64_t RoundUpToPanel(int64_t n) {
  return (n + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
}
// Distance of a tile's weight rows. An odd number of cache lines: 24 rows a
// multiple of 4 KiB apart would share one set of the L1 cache.
inline int64_t TileStride(int64_t num_keys) { return RoundUpToPanel(num_keys) + 16; }

// One KV head in float. num_keys is rounded up to whole panels with zeros.
struct PackedKv {
  const float* keys = nullptr;    // [num_keys / kPanelWidth][head_dim][kPanelWidth]
  const float* values = nullptr;  // [padded head_dim / kPanelWidth][num_keys][kPanelWidth]
  int64_t num_keys = 0;           // a multiple of kPanelWidth
  int head_dim = 0;
};

struct PromptTile {
  const float* queries = nullptr;  // [head_dim][kTileRows], scaled; rows beyond num_rows are 0
  int num_rows = 0;
  int64_t visible[kTileRows] = {};  // row r sees keys [0, visible[r]), ascending in r, >= 1
  bool scored[kTileRows] = {};      // rows that add to the gains:
  bool counts_pivotal = false;      // how often above the threshold of visible - 1; else
                                    // probabilities
  // Results and workspace.
  float* weights = nullptr;  // [kTileRows][weights_stride]
  int64_t weights_stride = 0;
  float* out = nullptr;      // [kTileRows][RoundUpToPanel(head_dim)], divided by the sum
  int64_t* gains = nullptr;  // [visible[num_rows - 1]], added to
};

struct PromptKernels {
  // Each row is computed in the same order of keys and channels wherever its
  // tile begins: chunks of a prompt equal the whole, bit for bit.
  void (*attend_tile)(const PackedKv& kv, const PromptTile& tile);
};

const PromptKernels& PromptKernelsOf(CpuTarget target);

}  // namespace heavywater
