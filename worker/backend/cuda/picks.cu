// The pick: of the parts' candidates the best, or in mode `all` every demoted
// position; ascending.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/scan_block.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = kScanThreads;
constexpr int kWarps = kThreads / kWarp;
// Keys that are brought to shared memory: as many as parts of the default number of
// picks yield.
constexpr int kSharedKeys = 2048;

struct PickShared {
  WaveToken* token;
  RecallItem* item;
  SelectSpace* select;
  int32_t* starts;  // [kMaxScanParts + 1] of the parts' candidates, counted together
  uint64_t* keys;   // [kSharedKeys]
  int32_t* picks;   // [max_picks]
  int64_t bytes;
};
__host__ __device__ inline PickShared CutPickShared(unsigned char* memory, int64_t max_picks) {
  SharedCutter cutter(memory);
  PickShared shared;
  shared.token = cutter.Take<WaveToken>(1);
  shared.item = cutter.Take<RecallItem>(1);
  shared.select = cutter.Take<SelectSpace>(1);
  shared.starts = cutter.Take<int32_t>(kMaxScanParts + 1);
  shared.keys = cutter.Take<uint64_t>(kSharedKeys);
  shared.picks = cutter.Take<int32_t>(max_picks);
  shared.bytes = cutter.bytes();
  return shared;
}

// A KV head's candidates as its parts left them.
struct PartKeys {
  const uint64_t* candidates;  // [parts][stride]
  const int32_t* starts;
  int64_t stride;
  int32_t parts;

  __device__ __forceinline__ uint64_t operator()(int i) const {
    int part = 0;
    while (part + 1 < parts && starts[part + 1] <= i) ++part;
    return Load(candidates + part * stride + (i - starts[part]));
  }
};

// Positions of the keys of at least `least`, in any order. Returns how many.
template <typename Keys>
__device__ __forceinline__ int TakePositions(const Keys& keys, int count, uint64_t least,
                                             const PickShared& shared) {
  if (threadIdx.x == 0) shared.select->counter = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const uint64_t key = keys(i);
    if (key >= least) shared.picks[atomicAdd(&shared.select->counter, 1)] = PositionOfKey(key);
  }
  __syncthreads();
  return shared.select->counter;
}

template <typename Keys>
__device__ __forceinline__ int TakeBest(const Keys& keys, int count, int max_picks,
                                        const PickShared& shared) {
  const uint64_t least =
      count > max_picks ? LeastOfBest(keys, count, max_picks, *shared.select) : 0;
  return TakePositions(keys, count, least, shared);
}

// Into shared.picks. Returns how many.
__device__ __forceinline__ int PickBest(const RecallWave& wave, int64_t list,
                                        const PickShared& shared) {
  const RecallItem& item = *shared.item;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kWarp) {
    static_assert(kMaxScanParts == kWarp);
    int through =
        thread < item.parts ? Load(wave.scratch.num_candidates + list * kMaxScanParts + thread) : 0;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, through, offset);
      if (thread >= offset) through += before;
    }
    if (thread == 0) shared.starts[0] = 0;
    shared.starts[thread + 1] = through;
  }
  __syncthreads();
  const int count = shared.starts[item.parts];
  const int64_t stride = wave.scratch.stride;
  const PartKeys keys = {wave.scratch.candidates + list * kMaxScanParts * stride, shared.starts,
                         stride, item.parts};
  if (count > kSharedKeys) return TakeBest(keys, count, item.max_picks, shared);
  for (int i = thread; i < count; i += kThreads) shared.keys[i] = keys(i);
  __syncthreads();
  const uint64_t* copied = shared.keys;
  return TakeBest([copied](int i) { return copied[i]; }, count, item.max_picks, shared);
}

// A word of demoted positions that have a copy.
__device__ __forceinline__ unsigned WordToPick(const RecallItem& item, const uint16_t* demoted,
                                               int kv_head, int words_per_page, int64_t word) {
  if (word >= int64_t{item.num_pages} * words_per_page) return 0;
  const unsigned bits = Load(demoted + word);
  const int64_t page = int64_t{kv_head} * item.num_pages + word / words_per_page;
  return bits != 0 && Load(reinterpret_cast<const uint64_t*>(item.host) + page) != 0 ? bits : 0u;
}

// The sum of the lower threads' counts; `total` becomes all threads'.
__device__ __forceinline__ int CountBefore(int count, int32_t* of_warps, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int through = count;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += before;
  }
  if (lane == kWarp - 1) of_warps[warp] = through;
  __syncthreads();
  int before = through - count;
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += of_warps[i];
    total += of_warps[i];
  }
  __syncthreads();  // before they are used again
  return before;
}

// Every position of the set, straight to `to`. Returns how many.
__device__ __forceinline__ int PickAll(const WaveShape& shape, const PickShared& shared,
                                       int kv_head, int max_picks, int32_t* to) {
  const RecallItem& item = *shared.item;
  const int words_per_page = shape.page_tokens / kCodeBlock;
  const int64_t words = int64_t{item.num_pages} * words_per_page;
  const uint16_t* demoted = item.demoted + (shared.token->num_sets == 1 ? 0 : kv_head) * words;
  int count = 0;
  for (int64_t base = 0; base < words; base += kThreads) {
    const int64_t word = base + threadIdx.x;
    unsigned left = WordToPick(item, demoted, kv_head, words_per_page, word);
    int total = 0;
    int next = count + CountBefore(__popc(left), shared.select->bins, total);
    for (; left != 0; left &= left - 1, ++next) {
      const int position = static_cast<int>(word) * kCodeBlock + __ffs(static_cast<int>(left)) - 1;
      if (next < max_picks) Store(to + next, position);
    }
    count += total;
  }
  return min(count, max_picks);
}

__global__ void __launch_bounds__(kThreads)
    PickKernel(WaveShape shape, const WaveToken* tokens, WaveScratch scratch, RecallWave wave) {
  const PickShared shared = CutPickShared(SharedMemory(), wave.max_picks);
  const int kv_head = static_cast<int>(blockIdx.x);
  const int64_t list = static_cast<int64_t>(blockIdx.y) * shape.num_kv_heads + kv_head;
  int32_t* to = scratch.picks + list * scratch.max_picks;
  LoadToken(tokens + blockIdx.y, *shared.token);
  int count = 0;
  if (shared.token->recall >= 0) {  // the same for the whole block, as are the next
    LoadItem(wave.items + (shared.token->recall - wave.first_item), *shared.item);
    if (shared.item->all != 0) {
      count = PickAll(shape, shared, kv_head, scratch.max_picks, to);
    } else {
      count = PickBest(wave, list, shared);
      SortAscending(shared.picks, count);
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
        Store(to + i, shared.picks[i]);
      }
    }
  }
  if (threadIdx.x == 0) Store(scratch.num_picks + list, count);
}

}  // namespace

cudaError_t LaunchPick(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                       const RecallWave& wave, cudaStream_t stream) {
  const int64_t shared = CutPickShared(nullptr, wave.max_picks).bytes;
  return Launch(PickKernel, dim3(shape.num_kv_heads, shape.num_tokens), dim3(kThreads), shared,
                stream, shape, tokens, scratch, wave);
}

cudaError_t LaunchRecallPicks(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream) {
  cudaError_t error = LaunchScan(shape, tokens, scratch, wave, stream);
  if (error == cudaSuccess) error = LaunchPick(shape, tokens, scratch, wave, stream);
  if (error == cudaSuccess) {
    error = LaunchAttendPicks(dtype, shape, tokens, scratch, wave, stream);
  }
  return error;
}

}  // namespace heavywater::cuda
