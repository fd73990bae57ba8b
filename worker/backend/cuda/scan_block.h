// What a block of the scan holds in shared memory, and how it walks its pages.
#pragma once

#include "worker/backend/cuda/picks_select.h"
#include "worker/backend/cuda/scan_page.h"

namespace heavywater::cuda {

// Positions that a block looks at between barriers.
inline constexpr int kRoundPositions = kScanWarps * kStepPositions;

struct ScanShared {
  WaveToken* token;
  RecallItem* item;
  SelectSpace* select;
  uint8_t* chosen;  // [num_channels]
  ScanQueries queries;
  ScanWeights weights;  // of the calling warp
  double* masses;       // [kScanWarps][8]
  uint64_t* keys;       // [max_picks + kRoundPositions]
  int32_t* num_keys;
  int64_t bytes;  // of all
};

// Consecutive areas of shared memory, each 16-byte aligned.
class SharedCutter {
 public:
  __host__ __device__ explicit SharedCutter(unsigned char* memory) : memory_(memory) {}
  template <typename T>
  __host__ __device__ T* Take(int64_t count) {
    T* area = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return area;
  }
  __host__ __device__ int64_t bytes() const { return bytes_; }

 private:
  unsigned char* memory_;
  int64_t bytes_ = 0;
};

__host__ __device__ inline ScanShared CutScanShared(unsigned char* memory, int warp,
                                                    int padded_group, int head_dim,
                                                    int num_channels, int64_t max_picks) {
  SharedCutter cutter(memory);
  ScanShared shared;
  shared.token = cutter.Take<WaveToken>(1);
  shared.item = cutter.Take<RecallItem>(1);
  shared.select = cutter.Take<SelectSpace>(1);
  shared.num_keys = cutter.Take<int32_t>(1);
  shared.chosen = cutter.Take<uint8_t>(num_channels);
  shared.queries.values = cutter.Take<float>(int64_t{padded_group} * head_dim);
  shared.queries.lse = cutter.Take<float>(padded_group);
  for (int i = 0; i < kScanWarps; ++i) {
    ScanWeights weights;
    weights.words = cutter.Take<int32_t>(int64_t{num_channels} / 4 * padded_group);
    weights.constants = cutter.Take<float>(padded_group);
    weights.units = cutter.Take<float>(padded_group);
    weights.thresholds = cutter.Take<int32_t>(padded_group);
    if (i == warp) shared.weights = weights;
  }
  shared.masses = cutter.Take<double>(kScanWarps * 8);
  shared.keys = cutter.Take<uint64_t>(max_picks + kRoundPositions);
  shared.bytes = cutter.bytes();
  return shared;
}

// What a lane looks at: `bits` of its kLanePositions positions from `position` on
// (within the page) count.
struct LaneStep {
  int position;
  unsigned bits;
};

// The pages of a part, a page for each warp and round.
struct ScanWalk {
  const RecallItem& item;
  const uint16_t* demoted;  // of the set
  int32_t kv_head;
  int32_t page_tokens;
  int32_t first;   // the part
  int32_t stride;  // parts

  // All lanes: the KV head's sketch of the page, null where there is nothing to scan.
  __device__ __forceinline__ const unsigned char* Sketch(int page) const {
    uint64_t address = 0;
    if (page < item.num_pages && threadIdx.x % kWarp == 0) {
      const int64_t index = int64_t{kv_head} * item.num_pages + page;
      if (Load(reinterpret_cast<const uint64_t*>(item.host) + index) != 0) {
        address = Load(reinterpret_cast<const uint64_t*>(item.sketches) + page) +
                  static_cast<uint64_t>(kv_head) * static_cast<uint64_t>(item.page_bytes);
      }
    }
    return reinterpret_cast<const unsigned char*>(__shfl_sync(kAllLanes, address, 0));
  }

  // All lanes. Four lanes share a word of demoted positions.
  __device__ __forceinline__ LaneStep Step(const unsigned char* sketch, int page, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int position = step * kStepPositions + lane * kLanePositions;
    const bool present = sketch != nullptr && position < page_tokens;
    unsigned word = 0;
    if (present && position % kCodeBlock == 0) {
      word = Load(demoted + (int64_t{page} * page_tokens + position) / kCodeBlock);
    }
    word = __shfl_sync(kAllLanes, word, lane & ~(kCodeBlock / kLanePositions - 1));
    return {position, present ? word >> position % kCodeBlock & 0xfu : 0u};
  }
};

// The block's token, item, queries and lse. False, for all threads, where the block
// has nothing to scan. Ends with a barrier.
__device__ __forceinline__ bool PrepareScan(const WaveShape& shape, const WaveToken* tokens,
                                            const RecallWave& wave, const SplitSum* totals,
                                            int padded_group, const ScanShared& shared) {
  LoadToken(tokens + blockIdx.z, *shared.token);
  if (shared.token->recall < 0) return false;
  LoadItem(wave.items + (shared.token->recall - wave.first_item), *shared.item);
  const RecallItem& item = *shared.item;
  if (item.all != 0 || static_cast<int>(blockIdx.x) >= item.parts) return false;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < item.num_channels; i += kScanThreads) {
    shared.chosen[i] = Load(item.channels + int64_t{kv_head} * item.num_channels + i);
  }
  const int64_t row =
      static_cast<int64_t>(blockIdx.z) * shape.num_query_heads + kv_head * group_size;
  for (int head = thread; head < padded_group; head += kScanThreads) {
    float lse = INFINITY;
    if (head < group_size) {
      const SplitSum total = Load(totals + row + head);
      lse = total.maximum == -INFINITY ? -INFINITY
                                       : static_cast<float>(total.maximum + log(total.sum));
    }
    shared.queries.lse[head] = lse;
  }
  __syncthreads();
  LoadScanQueries(item, shared.chosen, shared.token->queries, kv_head, group_size, padded_group,
                  shape.head_dim, shape.scale, shared.queries);
  __syncthreads();
  return true;
}

__device__ __forceinline__ ScanWalk WalkOf(const WaveShape& shape, const ScanShared& shared) {
  const RecallItem& item = *shared.item;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int64_t words = int64_t{item.num_pages} * shape.page_tokens / kCodeBlock;
  const int set = shared.token->num_sets == 1 ? 0 : kv_head;
  return {item,
          item.demoted + set * words,
          kv_head,
          shape.page_tokens,
          static_cast<int>(blockIdx.x),
          item.parts};
}

}  // namespace heavywater::cuda
