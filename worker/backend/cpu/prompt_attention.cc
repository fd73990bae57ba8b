#include "worker/backend/cpu/prompt_attention.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "worker/backend/cpu/scratch.h"
#include "worker/backend/host_memory.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

// Panel `first / kPanelWidth` of the keys: channel by channel, one key per lane.
template <typename T>
void PackKeys(const T* rows, int head_dim, int64_t first, int64_t end, float* panel) {
  for (int64_t key = first; key < first + kPanelWidth; ++key) {
    float* lane = panel + (key - first);
    const T* row = rows + key * head_dim;
    for (int i = 0; i < head_dim; ++i) lane[i * kPanelWidth] = key < end ? ToFloat(row[i]) : 0.0f;
  }
}

// Rows [first, first + kPanelWidth) of every panel of values.
template <typename T>
void PackValues(const T* rows, int head_dim, int64_t first, int64_t end, int64_t num_keys,
                float* panels) {
  const int64_t padded = RoundUpToPanel(head_dim);
  for (int64_t key = first; key < first + kPanelWidth; ++key) {
    for (int64_t i = 0; i < padded; ++i) {
      const bool exists = key < end && i < head_dim;
      panels[(i / kPanelWidth * num_keys + key) * kPanelWidth + i % kPanelWidth] =
          exists ? ToFloat(rows[key * head_dim + i]) : 0.0f;
    }
  }
}

// The query row of a tile's row: rows run over tokens, then the group's heads.
struct RowPlace {
  int64_t token;
  int64_t offset;  // in queries and out
};
RowPlace PlaceOfRow(const KvShape& shape, int kv_head, int64_t row) {
  const int64_t token = row / shape.group_size();
  const int64_t head = int64_t{kv_head} * shape.group_size() + row % shape.group_size();
  return {token, (token * shape.num_query_heads + head) * shape.head_dim};
}

}  // namespace

CpuPromptAttention::CpuPromptAttention(CpuTarget target, ThreadPool& pool)
    : kernels_(PromptKernelsOf(target)), pool_(pool) {}

CpuPromptAttention::Scratch CpuPromptAttention::CutScratch(const KvShape& shape, int64_t num_keys,
                                                           std::byte* memory) const {
  const int64_t padded_keys = RoundUpToPanel(num_keys);
  const int64_t padded_dim = RoundUpToPanel(shape.head_dim);
  ScratchCutter cutter(memory);
  Scratch scratch;
  scratch.keys = cutter.Take<float>(padded_keys * shape.head_dim);
  scratch.values = cutter.Take<float>(padded_keys * padded_dim);
  scratch.threads.resize(pool_.num_threads());
  for (ThreadScratch& thread : scratch.threads) {
    thread.queries = cutter.Take<float>(kTileRows * shape.head_dim);
    thread.weights = cutter.Take<float>(kTileRows * TileStride(padded_keys));
    thread.out = cutter.Take<float>(kTileRows * padded_dim);
    thread.gains = cutter.Take<int64_t>(num_keys);
  }
  scratch.bytes = cutter.bytes();
  return scratch;
}

int64_t CpuPromptAttention::ScratchBytes(const KvShape& shape, int64_t num_keys) const {
  return CutScratch(shape, num_keys, /*memory=*/nullptr).bytes;
}

void CpuPromptAttention::Attend(const KvShape& shape, const PromptParams& params) {
  if (params.num_tokens == 0) return;
  const int64_t num_keys = params.first_position + params.num_tokens;
  HW_CHECK(num_keys <= params.layer.capacity);
  scratch_ = CutScratch(shape, num_keys, params.scratch.device_address());
  HW_CHECK(scratch_.bytes <= params.scratch.size());
  const int64_t num_rows = params.num_tokens * shape.group_size();
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    Pack(shape, params, kv_head, num_keys);
    for (ThreadScratch& thread : scratch_.threads) std::fill_n(thread.gains, num_keys, 0);
    // The last tiles see the most keys: they go first, so that threads end together.
    pool_.Run(num_tiles, [&](int64_t task, int thread) {
      AttendTile(shape, params, kv_head, (num_tiles - 1 - task) * kTileRows,
                 scratch_.threads[thread]);
    });
    AddGains(params, kv_head, num_keys);
  }
}

void CpuPromptAttention::Pack(const KvShape& shape, const PromptParams& params, int kv_head,
                              int64_t num_keys) {
  const int64_t padded_keys = RoundUpToPanel(num_keys);
  float* keys = scratch_.keys;
  float* values = scratch_.values;
  packed_ = {.keys = keys, .values = values, .num_keys = padded_keys, .head_dim = shape.head_dim};
  const KvHeadRows rows = RowsOfKvHead(shape, params.layer, kv_head);
  const auto pack = [&](auto* key_rows, auto* value_rows, int64_t first) {
    PackKeys(key_rows, shape.head_dim, first, num_keys, keys + first * shape.head_dim);
    PackValues(value_rows, shape.head_dim, first, num_keys, padded_keys, values);
  };
  pool_.Run(padded_keys / kPanelWidth, [&](int64_t panel, int thread) {
    WithKvElement(shape.dtype, [&]<typename T>(std::type_identity<T>) {
      pack(reinterpret_cast<const T*>(rows.keys), reinterpret_cast<const T*>(rows.values),
           panel * kPanelWidth);
    });
  });
}

void CpuPromptAttention::AttendTile(const KvShape& shape, const PromptParams& params, int kv_head,
                                    int64_t first_row, const ThreadScratch& scratch) {
  const int64_t num_rows = params.num_tokens * shape.group_size();
  const int64_t padded = RoundUpToPanel(shape.head_dim);
  PromptTile tile;
  tile.num_rows = static_cast<int>(std::min<int64_t>(kTileRows, num_rows - first_row));
  float* queries = scratch.queries;
  std::fill_n(queries, kTileRows * shape.head_dim, 0.0f);
  for (int row = 0; row < tile.num_rows; ++row) {
    const RowPlace place = PlaceOfRow(shape, kv_head, first_row + row);
    const float* query = params.queries.device_address() + place.offset;
    for (int i = 0; i < shape.head_dim; ++i) queries[i * kTileRows + row] = query[i] * params.scale;
    const int64_t position = params.first_position + place.token;
    tile.visible[row] = position + 1;
    tile.scored[row] = position >= params.score_from;
  }
  tile.queries = queries;
  tile.weights_stride = TileStride(tile.visible[tile.num_rows - 1]);
  tile.weights = scratch.weights;
  tile.out = scratch.out;
  tile.gains = scratch.gains;
  tile.counts_pivotal = params.gains == GainKind::kPivotal;
  kernels_.attend_tile(packed_, tile);
  for (int row = 0; row < tile.num_rows; ++row) {
    std::copy_n(tile.out + row * padded, shape.head_dim,
                params.out.device_address() + PlaceOfRow(shape, kv_head, first_row + row).offset);
  }
}

void CpuPromptAttention::AddGains(const PromptParams& params, int kv_head, int64_t num_keys) {
  int64_t* gains = params.layer.gains.device_address() + kv_head * params.layer.capacity;
  for (const ThreadScratch& thread : scratch_.threads) {
    for (int64_t key = 0; key < num_keys; ++key) gains[key] += thread.gains[key];
  }
}

}  // namespace heavywater
