// Decode attention when a wave has blocks enough without splitting its tokens: a block
// walks over all splits of one token's KV head and keeps their weights, so that the
// gains need no second kernel and the weights never leave the multiprocessor.
#include "worker/backend/cuda/attend.h"
#include "worker/backend/cuda/attend_parts.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/split_rows.h"
#include "worker/backend/cuda/whole_wave.h"

namespace heavywater::cuda {
namespace {

// The block's shared memory, as WholeSharedBytes() counts it.
struct WholeShared {
  WaveToken* token;
  int32_t* positions;  // of the split at hand
  float* queries;
  float* shares;   // of the block's halves, then factors [splits][heads]
  float* weights;  // [splits][heads][kSplitSlots]
};

template <typename Block>
__device__ __forceinline__ WholeShared CutShared(unsigned char* memory) {
  WholeShared shared;
  shared.token = reinterpret_cast<WaveToken*>(memory);
  shared.positions = reinterpret_cast<int32_t*>(memory + kTokenSharedBytes);
  shared.queries = reinterpret_cast<float*>(shared.positions + kSplitSlots);
  shared.shares = shared.queries + Block::kQueries;
  shared.weights = shared.shares + Block::kOuts;
  return shared;
}

// One split, as AttendSplits leaves it but for the weights, which stay.
template <typename T, typename Block>
__device__ __forceinline__ void AttendSplit(const WaveShape& shape, const WaveScratch& scratch,
                                            const WholeShared& shared, int64_t row, int num_heads,
                                            int split) {
  const int kv_head = static_cast<int>(blockIdx.x);
  float* weights = shared.weights + split * Block::kWeights;
  StagePositions(*shared.token, kv_head, split, shared.positions);
  typename Block::Queries queries;
  Block::ReadQueries(shared.queries, queries);
  const SlotRows<T> keys = RowsOfSplit<T>(shape, *shared.token, kv_head, split, shared.positions);
  Block::template Logits<T>(keys, keys.count, queries, weights);
  __syncthreads();
  const SlotRows<T> rows = RowsOfSplit<T>(shape, *shared.token, kv_head, split, shared.positions);
  Block::Softmax(rows, weights, [&](int head, const SplitSum& sum) {
    if (head >= num_heads || LaneOfWarp() != 0) return;
    Store(scratch.sums + (row + head) * (scratch.splits + 1) + split, sum);
  });
  __syncthreads();
  typename Block::Outs outs;
  const SlotRows<T> values = RowsOfSplit<T>(shape, *shared.token, kv_head, split, shared.positions);
  Block::template Values<T>(values, values.count, weights, outs);
  Block::SumGroups(shared.shares, outs);
  const int64_t stride = static_cast<int64_t>(scratch.splits + 1) * shape.head_dim;
  Block::StoreOuts(outs, num_heads, shape.head_dim,
                   scratch.outs + row * stride + static_cast<int64_t>(split) * shape.head_dim,
                   stride);
}

// factors[split][head] of the token's rows. The same bits as Merge and AddGains have.
__device__ __forceinline__ void ComputeFactors(const WaveScratch& scratch, int64_t row,
                                               int num_heads, int stride, int used,
                                               double* factors) {
  for (int head = static_cast<int>(threadIdx.x) / kWarp; head < num_heads; head += kSplitWarps) {
    const RowParts parts = PartsOfRow(scratch, row + head, used, /*picks=*/false);
    const SplitSum total = parts.Total();
    for (int split = LaneOfWarp(); split < parts.num_splits; split += kWarp) {
      factors[split * stride + head] = Factor(parts.Sum(split), total);
    }
  }
}

template <typename Block>
__device__ __forceinline__ void AddAllGains(const WholeShared& shared, int num_heads) {
  const WaveToken& token = *shared.token;
  const double* factors = reinterpret_cast<const double*>(shared.shares);
  int64_t* gains = token.gains + static_cast<int>(blockIdx.x) * token.capacity;
  for (int slot = static_cast<int>(threadIdx.x) * 4; slot < token.used; slot += kSplitThreads * 4) {
    const int split = slot / kSplitSlots;
    const float* weights = shared.weights + split * Block::kWeights + slot % kSplitSlots;
    FourGains four = {};
    for (int head = 0; head < num_heads; ++head) {
      AddProbabilities(*reinterpret_cast<const float4*>(weights + head * kSplitSlots),
                       factors[split * Block::kNumHeads + head], token.pivotal, four);
    }
    AddToGains(four, gains + slot);
  }
}

template <typename T, int kLanes, int kHeads>
__global__ void __launch_bounds__(kSplitThreads, kWholeBlocks)
    AttendWhole(WaveShape shape, const WaveToken* tokens, WaveScratch scratch) {
  using Block = AttendBlock<kLanes, kHeads>;
  const WholeShared shared = CutShared<Block>(SharedMemory());
  LoadToken(tokens + blockIdx.y, *shared.token);
  const int num_heads = shape.num_query_heads / shape.num_kv_heads;
  const int head = static_cast<int>(blockIdx.x) * num_heads;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * shape.num_query_heads + head;
  Block::StageQueries(shared.token->queries + static_cast<int64_t>(head) * shape.head_dim,
                      num_heads, shape.head_dim, shape.scale, shared.queries);
  const int num_splits = NumSplits(shared.token->used);
  for (int split = 0; split < num_splits; ++split) {
    AttendSplit<T, Block>(shape, scratch, shared, row, num_heads, split);
  }
  if (shared.token->gains == nullptr) return;  // the whole block
  __syncthreads();                             // the sums are written, the shares read
  ComputeFactors(scratch, row, num_heads, kHeads, shared.token->used,
                 reinterpret_cast<double*>(shared.shares));
  __syncthreads();
  AddAllGains<Block>(shared, num_heads);
}

template <typename T, int kLanes, int kHeads>
cudaError_t Start(AttendBlock<kLanes, kHeads>, const WaveShape& shape, const WaveToken* tokens,
                  const WaveScratch& scratch, int64_t shared_bytes, cudaStream_t stream) {
  const dim3 grid(shape.num_kv_heads, shape.num_tokens);
  return Launch(AttendWhole<T, kLanes, kHeads>, grid, dim3(kSplitThreads), shared_bytes, stream,
                shape, tokens, scratch);
}

}  // namespace

cudaError_t LaunchAttendWhole(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, int64_t shared_bytes,
                              cudaStream_t stream) {
  const int group_size = shape.num_query_heads / shape.num_kv_heads;
  return WithAttendBlock(shape.head_dim, group_size, [&](auto block) {
    return WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
      return Start<T>(block, shape, tokens, scratch, shared_bytes, stream);
    });
  });
}

}  // namespace heavywater::cuda
