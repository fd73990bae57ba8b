// Rows of a layer into another one's first slots, or into its own.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/records.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
// Of 16 bytes, of a row, for one block. In place few: only columns are independent.
constexpr int kColumnWords = 16;
constexpr int kColumnWordsInPlace = 4;
constexpr int kMostTilesAtOnce = 64;

// Grid: tiles of slots, columns of a row, K and V of every KV head. In place there is
// one block of tiles, which goes through them in order: a row only moves towards slot
// 0, so a tile's reads lie at or above its own slots, and what it overwrites no later
// tile reads. Within a tile everyone reads before anyone writes.
template <int kWords>
__global__ void __launch_bounds__(kThreads) gather_rows(GatherParams params) {
  constexpr int kTileRows = kThreads / kWords;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int kv_head = static_cast<int>(blockIdx.z / 2);
  const bool is_key = blockIdx.z % 2 == 0;
  const int words = static_cast<int>(params.to.row_bytes / sizeof(uint4));
  const int word = static_cast<int>(blockIdx.y * kWords + threadIdx.x % kWords);
  const int32_t* kept = params.kept + SetOf(params.to, kv_head) * params.count;
  const uint4* from =
      (is_key ? KeyRow(params.from, kv_head, 0) : ValueRow(params.from, kv_head, 0)) + word;
  uint4* to = (is_key ? KeyRow(params.to, kv_head, params.first)
                      : ValueRow(params.to, kv_head, params.first)) +
              word;
  for (int64_t tile = blockIdx.x; tile * kTileRows < params.count; tile += gridDim.x) {
    const int64_t row = tile * kTileRows + threadIdx.x / kWords;
    const bool present = row < params.count && word < words;
    int32_t source = 0;
    if (lane % kWords == 0 && row < params.count) source = Load(kept + row);
    source = __shfl_sync(kAllLanes, source, lane - lane % kWords);
    uint4 value = {};
    if (present) value = LoadOnce(from + int64_t{source} * words);
    __syncthreads();
    if (present) Store(to + row * words, value);
    // The next tile of this block may read nothing that this one writes; its writes
    // wait for all reads at its own barrier.
  }
}

// A thread per slot and set.
__global__ void __launch_bounds__(kThreads) gather_tables(GatherParams params) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= params.count) return;
  const LayerSlots& to = params.to;
  const int set = static_cast<int>(blockIdx.y);
  const int64_t slot = params.first + row;
  int32_t position = -1;
  int64_t score = 0;
  if (params.kept != nullptr) {
    position = Load(params.kept + set * params.count + row);
    if (params.seeds != nullptr) score = Load(params.seeds + set * params.seed_stride + position);
  }
  Store(to.positions + set * to.capacity + slot, position);
  Store(to.scores + set * to.capacity + slot, score);
  const int heads = to.num_sets == 1 ? to.num_kv_heads : 1;
  for (int head = 0; head < heads; ++head) {
    Store(to.gains + (set + head) * to.capacity + slot, int64_t{0});
  }
}

// A warp per KV head and position that comes back.
__global__ void __launch_bounds__(kThreads) promote_rows(PromoteRows params) {
  const int row = static_cast<int>(blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp);
  if (row >= params.heads * params.count) return;
  const int entry = row % params.count;
  const int head = row / params.count;
  const int kv_head = params.first_kv_head + head;
  const int slot = LoadForWarp(params.slots + entry);
  const auto* host = reinterpret_cast<const uint4*>(LoadForWarp(params.host_rows + row));
  uint4* const keys = KeyRow(params.layer, kv_head, slot);
  uint4* const values = ValueRow(params.layer, kv_head, slot);
  const int words = static_cast<int>(params.layer.row_bytes / sizeof(uint4));
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int i = lane; i < 2 * words; i += kWarp) {
    Store(i < words ? keys + i : values + (i - words), LoadHost(host + i));
  }
  if (lane == 0) {
    FillTables(params.layer, kv_head, slot, head == 0, Load(params.positions + entry),
               Load(params.scores + entry));
  }
}

// A thread per slot.
__global__ void __launch_bounds__(kThreads)
    release_slots(LayerSlots layer, int set, const int32_t* slots, int count) {
  const int entry = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (entry >= count) return;
  const int64_t slot = Load(slots + entry);
  Store(layer.positions + set * layer.capacity + slot, -1);
  Store(layer.scores + set * layer.capacity + slot, 0);
  const int heads = layer.num_sets == 1 ? layer.num_kv_heads : 1;
  for (int head = 0; head < heads; ++head) {
    Store(layer.gains + (set + head) * layer.capacity + slot, 0);
  }
}

unsigned Blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace

cudaError_t LaunchGatherRows(const GatherParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const int64_t words = params.to.row_bytes / static_cast<int64_t>(sizeof(uint4));
  const auto heads = static_cast<unsigned>(2 * params.to.num_kv_heads);
  if (params.from.keys == params.to.keys) {
    return Launch(gather_rows<kColumnWordsInPlace>,
                  dim3(1, Blocks(words, kColumnWordsInPlace), heads), dim3(kThreads), 0, stream,
                  params);
  }
  const unsigned tiles = Blocks(params.count, kThreads / kColumnWords);
  return Launch(gather_rows<kColumnWords>,
                dim3(tiles < kMostTilesAtOnce ? tiles : unsigned{kMostTilesAtOnce},
                     Blocks(words, kColumnWords), heads),
                dim3(kThreads), 0, stream, params);
}

cudaError_t LaunchGatherTables(const GatherParams& params, cudaStream_t stream) {
  const dim3 grid(Blocks(params.count, kThreads), static_cast<unsigned>(params.to.num_sets));
  return Launch(gather_tables, grid, dim3(kThreads), 0, stream, params);
}

cudaError_t LaunchPromote(const PromoteRows& params, cudaStream_t stream) {
  const dim3 grid(Blocks(int64_t{params.heads} * params.count, kThreads / kWarp));
  return Launch(promote_rows, grid, dim3(kThreads), 0, stream, params);
}

cudaError_t LaunchRelease(const LayerSlots& layer, int set, const int32_t* slots, int count,
                          cudaStream_t stream) {
  return Launch(release_slots, dim3(Blocks(count, kThreads)), dim3(kThreads), 0, stream, layer, set,
                slots, count);
}

}  // namespace heavywater::cuda
