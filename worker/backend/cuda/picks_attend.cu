// attend_picks: one more split of each query row, over rows read in place from host
// memory. Each row, K and V together, crosses the bus once for all query heads of
// its KV head.
#include <cmath>

#include "worker/backend/cuda/kv_row.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/scan_block.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeadsAtOnce = 8;  // a warp for the softmax of each
static_assert(kHeadsAtOnce <= kWarps);
constexpr int kTileBytes = 32 * 1024;
constexpr int kMaxTileRows = 64;
constexpr int kRowPadding = 16;  // bytes: rows begin in different banks

// Rows that are in shared memory at a time.
int TileRows(int row_bytes) {
  const int rows = kTileBytes / row_bytes;
  return rows < 1 ? 1 : rows > kMaxTileRows ? kMaxTileRows : rows;
}

struct PicksShared {
  WaveToken* token;
  RecallItem* item;
  float* queries;       // [kHeadsAtOnce][head_dim] scaled
  float* weights;       // [kHeadsAtOnce][tile_rows]
  float* rescale;       // [kHeadsAtOnce] of what earlier tiles left
  float* maxima;        // [group_size]
  unsigned char* rows;  // [tile_rows][row_bytes + kRowPadding]
  int64_t bytes;
};
__host__ __device__ inline PicksShared CutPicksShared(unsigned char* memory, int group_size,
                                                      int head_dim, int tile_rows, int row_bytes) {
  SharedCutter cutter(memory);
  PicksShared shared;
  shared.token = cutter.Take<WaveToken>(1);
  shared.item = cutter.Take<RecallItem>(1);
  shared.queries = cutter.Take<float>(kHeadsAtOnce * head_dim);
  shared.weights = cutter.Take<float>(kHeadsAtOnce * tile_rows);
  shared.rescale = cutter.Take<float>(kHeadsAtOnce);
  shared.maxima = cutter.Take<float>(group_size);
  shared.rows = cutter.Take<unsigned char>(int64_t{tile_rows} * (row_bytes + kRowPadding));
  shared.bytes = cutter.bytes();
  return shared;
}

// One KV head of one token.
struct PicksWork {
  const WaveShape& shape;
  const WaveScratch& scratch;
  int32_t group_size;
  int32_t kv_head;
  int64_t first_row;     // of the group's query rows
  const int32_t* picks;  // ascending
  int32_t tile_rows;
  int32_t row_bytes;

  __device__ __forceinline__ int64_t PicksSplit(int head) const {
    return (first_row + head) * (scratch.splits + 1) + scratch.splits;
  }
  __device__ __forceinline__ float* Weights(int head) const {
    return scratch.pick_weights + (first_row + head) * scratch.max_picks;
  }
};

// The tile's rows from their pages. No barrier.
__device__ __forceinline__ void ReadRows(const PicksWork& work, const RecallItem& item, int first,
                                         int count, unsigned char* to) {
  const int pieces = work.row_bytes / 16;
  const int page_tokens = work.shape.page_tokens;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < count * pieces; i += kThreads) {
    const int row = i / pieces;
    const int piece = i % pieces;
    const int position = Load(work.picks + first + row);
    const unsigned char* page =
        Load(item.host + int64_t{work.kv_head} * item.num_pages + position / page_tokens);
    const unsigned char* from = page + int64_t{position % page_tokens} * work.row_bytes;
    reinterpret_cast<uint4*>(to + row * (work.row_bytes + kRowPadding))[piece] =
        LoadHost(reinterpret_cast<const uint4*>(from) + piece);
  }
}

template <typename T>
__device__ __forceinline__ KvPack<T> SharedPack(const T* row) {
  return *reinterpret_cast<const KvPack<T>*>(row);
}

template <typename T>
__device__ __forceinline__ float Logit(const T* key, const float* query, int head_dim) {
  float sums[4] = {};
  for (int channel = 0; channel < head_dim; channel += kLaneChannels) {
    float values[kLaneChannels];
    Unpack(SharedPack(key + channel), values);
    const float4 lower = *reinterpret_cast<const float4*>(query + channel);
    const float4 upper = *reinterpret_cast<const float4*>(query + channel + 4);
    sums[0] = fmaf(upper.x, values[4], fmaf(lower.x, values[0], sums[0]));
    sums[1] = fmaf(upper.y, values[5], fmaf(lower.y, values[1], sums[1]));
    sums[2] = fmaf(upper.z, values[6], fmaf(lower.z, values[2], sums[2]));
    sums[3] = fmaf(upper.w, values[7], fmaf(lower.w, values[3], sums[3]));
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A thread for each row and head: neighbours have neighbouring rows and one query.
template <typename T>
__device__ __forceinline__ void Logits(const PicksWork& work, int first_head, int num_heads,
                                       int first, int count, const PicksShared& shared) {
  const int head_dim = work.shape.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < num_heads * count; i += kThreads) {
    const int head = i / count;
    const int row = i % count;
    const T* key = reinterpret_cast<const T*>(shared.rows + row * (work.row_bytes + kRowPadding));
    const float logit = Logit(key, shared.queries + head * head_dim, head_dim);
    shared.weights[head * work.tile_rows + row] = logit;
    Store(work.Weights(first_head + head) + first + row, logit);
  }
}

// The tile's weights relative to the largest logit so far; a warp for each head.
__device__ __forceinline__ void Weigh(const PicksWork& work, int first_head, int num_heads,
                                      int count, const PicksShared& shared) {
  const int head = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (head >= num_heads) return;  // the whole warp
  float* weights = shared.weights + head * work.tile_rows;
  const float before = shared.maxima[first_head + head];
  float maximum = before;
  for (int row = lane; row < count; row += kWarp) maximum = fmaxf(maximum, weights[row]);
  maximum = WarpMax(maximum);
  for (int row = lane; row < count; row += kWarp) weights[row] = expf(weights[row] - maximum);
  if (lane != 0) return;
  shared.rescale[head] = expf(before - maximum);
  shared.maxima[first_head + head] = maximum;
}

template <typename T>
__device__ __forceinline__ float2 SharedPair(const T* row) {
  const unsigned both = *reinterpret_cast<const unsigned*>(row);
  return {HalfOfWord<T>(both & 0xffffu), HalfOfWord<T>(both >> 16)};
}
__device__ __forceinline__ float2 SharedPair(const float* row) {
  return *reinterpret_cast<const float2*>(row);
}

// A thread for two heads and two channels.
template <typename T>
__device__ __forceinline__ void AddValues(const PicksWork& work, int first_head, int num_heads,
                                          int first, int count, const PicksShared& shared) {
  const int head_dim = work.shape.head_dim;
  const int pairs = head_dim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < (num_heads + 1) / 2 * pairs; i += kThreads) {
    const int head = i / pairs * 2;
    const int channel = i % pairs * 2;
    const int other = head + 1 < num_heads ? head + 1 : head;
    float2 sums[2] = {};
#pragma unroll 4
    for (int row = 0; row < count; ++row) {
      const T* value =
          reinterpret_cast<const T*>(shared.rows + row * (work.row_bytes + kRowPadding)) +
          head_dim + channel;
      const float2 pair = SharedPair(value);
      const float weight = shared.weights[head * work.tile_rows + row];
      const float weight_of_other = shared.weights[other * work.tile_rows + row];
      sums[0].x = fmaf(weight, pair.x, sums[0].x);
      sums[0].y = fmaf(weight, pair.y, sums[0].y);
      sums[1].x = fmaf(weight_of_other, pair.x, sums[1].x);
      sums[1].y = fmaf(weight_of_other, pair.y, sums[1].y);
    }
    for (int h = head; h <= other; ++h) {
      float* out = work.scratch.outs + work.PicksSplit(first_head + h) * head_dim + channel;
      float2 sum = sums[h - head];
      if (first > 0) {
        const float2 before = Load(reinterpret_cast<const float2*>(out));
        sum.x = fmaf(shared.rescale[h], before.x, sum.x);
        sum.y = fmaf(shared.rescale[h], before.y, sum.y);
      }
      Store(reinterpret_cast<float2*>(out), sum);
    }
  }
}

// Logits to weights relative to their maximum, and their sum, exact to the weights.
__device__ __forceinline__ void Finish(const PicksWork& work, int count,
                                       const PicksShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int head = static_cast<int>(threadIdx.x) / kWarp; head < work.group_size; head += kWarps) {
    SplitSum sum = {0, shared.maxima[head], 0};
    float* weights = work.Weights(head);
    for (int i = lane; i < count; i += kWarp) {
      const float weight = expf(Load(weights + i) - sum.maximum);
      Store(weights + i, weight);
      sum.sum += static_cast<double>(weight);
    }
    sum.sum = WarpSum(sum.sum);
    if (lane == 0) Store(work.scratch.sums + work.PicksSplit(head), sum);
  }
}

template <typename T>
__device__ __forceinline__ void AttendTile(const PicksWork& work, int first, int count,
                                           const PicksShared& shared) {
  const int head_dim = work.shape.head_dim;
  ReadRows(work, *shared.item, first, count, shared.rows);
  for (int first_head = 0; first_head < work.group_size; first_head += kHeadsAtOnce) {
    const int num_heads = min(work.group_size - first_head, kHeadsAtOnce);
    const float* queries =
        shared.token->queries + (int64_t{work.kv_head} * work.group_size + first_head) * head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < num_heads * head_dim; i += kThreads) {
      shared.queries[i] = Load(queries + i) * work.shape.scale;
    }
    __syncthreads();
    Logits<T>(work, first_head, num_heads, first, count, shared);
    __syncthreads();
    Weigh(work, first_head, num_heads, count, shared);
    __syncthreads();
    AddValues<T>(work, first_head, num_heads, first, count, shared);
    __syncthreads();  // before rows, queries and weights are used again
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    AttendPicksKernel(WaveShape shape, const WaveToken* tokens, WaveScratch scratch,
                      RecallWave wave, int tile_rows) {
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int row_bytes = 2 * shape.head_dim * static_cast<int>(sizeof(T));
  const PicksShared shared =
      CutPicksShared(SharedMemory(), group_size, shape.head_dim, tile_rows, row_bytes);
  LoadToken(tokens + blockIdx.y, *shared.token);
  if (shared.token->recall < 0) return;  // the whole block
  LoadItem(wave.items + (shared.token->recall - wave.first_item), *shared.item);
  const int kv_head = static_cast<int>(blockIdx.x);
  const int64_t token = blockIdx.y;
  const int64_t list = token * shape.num_kv_heads + kv_head;
  const PicksWork work = {shape,
                          scratch,
                          group_size,
                          kv_head,
                          token * shape.num_query_heads + int64_t{kv_head} * group_size,
                          scratch.picks + list * scratch.max_picks,
                          tile_rows,
                          row_bytes};
  for (int head = static_cast<int>(threadIdx.x); head < group_size; head += kThreads) {
    shared.maxima[head] = -INFINITY;
  }
  const int count = Load(scratch.num_picks + list);
  for (int first = 0; first < count; first += tile_rows) {
    AttendTile<T>(work, first, min(count - first, tile_rows), shared);
  }
  __syncthreads();
  Finish(work, count, shared);
}

}  // namespace

cudaError_t LaunchAttendPicks(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream) {
  const int row_bytes = 2 * shape.head_dim * ElementBytes(dtype);
  const int tile_rows = TileRows(row_bytes);
  const int64_t shared = CutPicksShared(nullptr, shape.num_query_heads / shape.num_kv_heads,
                                        shape.head_dim, tile_rows, row_bytes)
                             .bytes;
  const dim3 grid(shape.num_kv_heads, shape.num_tokens);
  return WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
    return Launch(AttendPicksKernel<T>, grid, dim3(kThreads), shared, stream, shape, tokens,
                  scratch, wave, tile_rows);
  });
}

}  // namespace heavywater::cuda
