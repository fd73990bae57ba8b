// The main pass of decode attention: a block reads one split of one KV head's
// slots once, for all query heads of the group.
#include "worker/backend/cuda/attend.h"
#include "worker/backend/cuda/attend_block.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/wave_token.h"

namespace heavywater::cuda {
namespace {

// Slots of one split. Positions lie in shared memory, -1 beyond the last slot.
template <typename T>
struct SlotRows {
  const T* keys;  // of the split's first slot
  const T* values;
  const int32_t* positions;
  int count;
  int head_dim;
  int position;  // the query's

  // Slots whose position is at most its own; a free one's -1 is the largest unsigned.
  __device__ __forceinline__ bool Sees(int slot) const {
    return static_cast<unsigned>(positions[slot]) <= static_cast<unsigned>(position);
  }
  // Loaded whether seen or not: positions need not have arrived.
  __device__ __forceinline__ KvPack<T> Key(int slot, int channel) const {
    return LoadPack(keys + static_cast<int64_t>(slot) * head_dim + channel,
                    slot < count && channel < head_dim);
  }
  // What is not seen is not read: a free slot may hold anything.
  __device__ __forceinline__ KvPack<T> Value(int slot, int channel) const {
    return LoadPack(values + static_cast<int64_t>(slot) * head_dim + channel,
                    channel < head_dim && Sees(slot));
  }
};

// Where the token's split lies. Called again for each phase, so that no registers hold
// it in between: the token lies in shared memory.
template <typename T>
__device__ __forceinline__ SlotRows<T> RowsOfSplit(const WaveShape& shape, const WaveToken& token,
                                                   const int32_t* positions) {
  const int first = static_cast<int>(blockIdx.x) * kSplitSlots;
  const int64_t row = (static_cast<int>(blockIdx.y) * token.capacity + first) * shape.head_dim;
  return {static_cast<const T*>(token.keys) + row,
          static_cast<const T*>(token.values) + row,
          positions,
          min(token.used - first, kSplitSlots),
          shape.head_dim,
          token.position};
}

__device__ __forceinline__ void StagePositions(const WaveToken& token, int32_t* positions) {
  const int first = static_cast<int>(blockIdx.x) * kSplitSlots;
  const int set = token.num_sets == 1 ? 0 : static_cast<int>(blockIdx.y);
  const int32_t* from = token.positions + set * token.capacity + first;
  for (int slot = static_cast<int>(threadIdx.x); slot < kSplitSlots; slot += kSplitThreads) {
    positions[slot] = first + slot < token.used ? Load(from + slot) : -1;
  }
}

// Weights of the warp's head to scratch, whole vectors of slots.
__device__ __forceinline__ void StoreWeights(const float* weights, int count, float* to) {
  for (int slot = static_cast<int>(threadIdx.x) % kWarp * 4; slot < count; slot += kWarp * 4) {
    Store(reinterpret_cast<float4*>(to + slot), *reinterpret_cast<const float4*>(weights + slot));
  }
}

template <typename T, int kLanes, int kHeads>
__global__ void __launch_bounds__(kSplitThreads, 2)
    AttendSplits(WaveShape shape, const WaveToken* tokens, WaveScratch scratch) {
  using Block = AttendBlock<kLanes, kHeads>;
  WaveToken& token = *reinterpret_cast<WaveToken*>(SharedMemory());
  int32_t* positions = reinterpret_cast<int32_t*>(SharedMemory() + kTokenSharedBytes);
  float* shared = reinterpret_cast<float*>(positions + kSplitSlots);
  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  LoadToken(tokens + blockIdx.z, token);
  if (split >= NumSplits(token.used)) return;  // the whole block
  StagePositions(token, positions);
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  for (int first = 0; first < group_size; first += kHeads) {
    const int head = kv_head * group_size + first;
    const int num_heads = min(group_size - first, kHeads);
    typename Block::Queries queries;
    Block::LoadQueries(token.queries + static_cast<int64_t>(head) * shape.head_dim, num_heads,
                       shape.head_dim, shape.scale, shared, queries);
    const SlotRows<T> keys = RowsOfSplit<T>(shape, token, positions);
    Block::template Logits<T>(keys, keys.count, queries, shared);
    __syncthreads();
    const SlotRows<T> rows = RowsOfSplit<T>(shape, token, positions);
    const SplitSum sum = Block::Softmax(rows, shared);
    __syncthreads();

    const int64_t row = static_cast<int64_t>(blockIdx.z) * shape.num_query_heads + head;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (warp < num_heads) {
      if (token.gains != nullptr) {
        StoreWeights(shared + warp * kSplitSlots, rows.count,
                     scratch.weights + ((row + warp) * scratch.splits + split) * kSplitSlots);
      }
      if (threadIdx.x % kWarp == 0) {
        Store(scratch.sums + (row + warp) * (scratch.splits + 1) + split, sum);
      }
    }
    typename Block::Outs outs;
    const SlotRows<T> values = RowsOfSplit<T>(shape, token, positions);
    Block::template Values<T>(values, values.count, shared, outs);
    __syncthreads();
    Block::SumGroups(shared, outs);
    const int64_t stride = static_cast<int64_t>(scratch.splits + 1) * shape.head_dim;
    Block::StoreOuts(outs, num_heads, shape.head_dim,
                     scratch.outs + row * stride + static_cast<int64_t>(split) * shape.head_dim,
                     stride);
  }
}

template <typename T, int kLanes, int kHeads>
cudaError_t Start(AttendBlock<kLanes, kHeads> block, const WaveShape& shape,
                  const WaveToken* tokens, const WaveScratch& scratch, cudaStream_t stream) {
  const dim3 grid(scratch.splits, shape.num_kv_heads, shape.num_tokens);
  const size_t shared_bytes =
      kTokenSharedBytes + kSplitSlots * sizeof(int32_t) + block.kSharedFloats * sizeof(float);
  return Launch(AttendSplits<T, kLanes, kHeads>, grid, dim3(kSplitThreads), shared_bytes, stream,
                shape, tokens, scratch);
}

}  // namespace

cudaError_t LaunchAttendSplits(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                               const WaveScratch& scratch, cudaStream_t stream) {
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  return WithAttendBlock(shape.head_dim, group_size, [&](auto block) {
    switch (dtype) {
      case KvDtype::kFloat32:
        return Start<float>(block, shape, tokens, scratch, stream);
      case KvDtype::kFloat16:
        return Start<Float16>(block, shape, tokens, scratch, stream);
      case KvDtype::kBFloat16:
        break;
    }
    return Start<BFloat16>(block, shape, tokens, scratch, stream);
  });
}

}  // namespace heavywater::cuda
