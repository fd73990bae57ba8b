// The main pass of decode attention: a block reads one split of one KV head's
// slots once, for all query heads of the group.
#include "worker/backend/cuda/attend.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/split_rows.h"

namespace heavywater::cuda {
namespace {

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
  StagePositions(token, kv_head, split, positions);
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  for (int first = 0; first < group_size; first += kHeads) {
    const int head = kv_head * group_size + first;
    const int num_heads = min(group_size - first, kHeads);
    typename Block::Queries queries;
    Block::StageQueries(token.queries + static_cast<int64_t>(head) * shape.head_dim, num_heads,
                        shape.head_dim, shape.scale, shared);
    Block::ReadQueries(shared, queries);
    __syncthreads();
    const SlotRows<T> keys = RowsOfSplit<T>(shape, token, kv_head, split, positions);
    Block::template Logits<T>(keys, keys.count, queries, shared);
    __syncthreads();
    const SlotRows<T> rows = RowsOfSplit<T>(shape, token, kv_head, split, positions);
    const int64_t row = static_cast<int64_t>(blockIdx.z) * shape.num_query_heads + head;
    Block::Softmax(rows, shared, [&](int of_head, const SplitSum& sum) {
      if (of_head >= num_heads || threadIdx.x % kWarp != 0) return;
      Store(scratch.sums + (row + of_head) * (scratch.splits + 1) + split, sum);
    });
    __syncthreads();

    if (token.gains != nullptr) {
      for (int i = static_cast<int>(threadIdx.x) / kWarp; i < num_heads; i += kSplitWarps) {
        StoreWeights(shared + i * kSplitSlots, rows.count,
                     scratch.weights + ((row + i) * scratch.splits + split) * kSplitSlots);
      }
    }
    typename Block::Outs outs;
    const SlotRows<T> values = RowsOfSplit<T>(shape, token, kv_head, split, positions);
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
