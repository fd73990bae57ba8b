// ObserveQueries and ChooseChannels.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/sketch_keys.h"
#include "worker/cache/sketch_shape.h"

namespace heavywater::cuda {
namespace {

constexpr int kMaxHeadDim = 256;

int ThreadsOf(int head_dim) { return (head_dim + kWarp - 1) / kWarp * kWarp; }

__global__ void ObserveKernel(ObserveParams params) {
  const int channel = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int64_t token = params.first_token + blockIdx.x;
  if (channel >= params.head_dim) return;
  const int64_t row = token * params.num_query_heads + int64_t{kv_head} * params.group_size;
  const float* query = params.queries + row * params.head_dim + channel;
  float sum = 0;
  for (int head = 0; head < params.group_size; ++head) {
    const float q = Load(query + int64_t{head} * params.head_dim);
    sum = Plus(sum, Times(q, q));
  }
  const int64_t entry = (params.first_position + token) % kSketchQueries;
  Store(params.squares + (kv_head * kSketchQueries + entry) * params.head_dim + channel, sum);
}

// Of one page and KV head: means and squares of deviations, in float.
template <typename T>
__global__ void __launch_bounds__(kMaxHeadDim)
    PageMomentsKernel(MomentsWorks works, int num_staged, float* of_pages) {
  const SketchGeometry& geometry = works.geometry;
  const MomentsWork& work = works.work[blockIdx.x];
  const PageKeys<T> keys =
      StageKeys<T>(work.rows, work.count, num_staged, geometry.head_dim, SharedMemory());
  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= geometry.head_dim || work.count == 0) return;
  float mean = 0;
  for (int row = 0; row < work.count; ++row) mean = Plus(mean, keys.Key(row, channel));
  mean = Over(mean, static_cast<float>(work.count));
  float squares = 0;
  for (int row = 0; row < work.count; ++row) {
    const float deviation = Plus(keys.Key(row, channel), -mean);
    squares = Plus(squares, Times(deviation, deviation));
  }
  float* to = of_pages + int64_t{2} * blockIdx.x * geometry.head_dim + channel;
  Store(to, mean);
  Store(to + geometry.head_dim, squares);
}

// Chan, Golub, LeVeque: two sets' moments give their union's. A block for each KV head.
__global__ void __launch_bounds__(kMaxHeadDim)
    AddMomentsKernel(MomentsWorks works, int num_works, int first, MomentsState state) {
  const int channel = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.x);
  const int head_dim = works.geometry.head_dim;
  const int64_t index = int64_t{kv_head} * head_dim + channel;
  const bool counts = channel < head_dim;
  double count = first != 0 ? 0 : Load(state.count + kv_head);
  double mean = first != 0 || !counts ? 0 : Load(state.mean + index);
  double squares = first != 0 || !counts ? 0 : Load(state.squares + index);
  for (int i = kv_head; i < num_works; i += static_cast<int>(gridDim.x)) {
    if (works.work[i].count == 0) continue;
    const auto added = static_cast<double>(works.work[i].count);
    const double total = count + added;
    if (counts) {
      const float* page = state.of_pages + int64_t{2} * i * head_dim + channel;
      const double difference = Plus(static_cast<double>(Load(page)), -mean);
      mean = Plus(mean, Times(difference, Over(added, total)));
      const double between = Times(Times(difference, difference), Over(Times(count, added), total));
      squares = Plus(squares, Plus(static_cast<double>(Load(page + head_dim)), between));
    }
    count = total;
  }
  __syncthreads();  // all have read the count
  if (channel == 0) Store(state.count + kv_head, count);
  if (!counts) return;
  Store(state.mean + index, mean);
  Store(state.squares + index, squares);
}

// A channel's rank is the number of better ones.
__global__ void __launch_bounds__(kMaxHeadDim) ChooseKernel(ChooseParams params) {
  const int channel = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.x);
  auto* values = reinterpret_cast<double*>(SharedMemory());
  auto* chosen = reinterpret_cast<int32_t*>(values + params.head_dim);
  const bool counts = channel < params.head_dim;
  double value = 0;
  if (counts) {
    double energy = params.num_queries == 0 ? 1 : 0;
    const float* squares =
        params.squares + int64_t{kv_head} * kSketchQueries * params.head_dim + channel;
    for (int query = 0; query < params.num_queries; ++query) {
      energy = Plus(energy, static_cast<double>(Load(squares + query * params.head_dim)));
    }
    value =
        Times(energy, Load(params.state.squares + int64_t{kv_head} * params.head_dim + channel));
    values[channel] = value;
  }
  __syncthreads();
  bool is_chosen = false;
  if (counts) {
    int rank = 0;
    for (int other = 0; other < params.head_dim; ++other) {
      if (values[other] > value || (values[other] == value && other < channel)) ++rank;
    }
    is_chosen = rank < params.num_channels;
    chosen[channel] = is_chosen ? 1 : 0;
  }
  __syncthreads();
  if (!is_chosen) return;
  int index = 0;
  for (int other = 0; other < channel; ++other) index += chosen[other];
  Store(params.channels + int64_t{kv_head} * params.num_channels + index,
        static_cast<uint8_t>(channel));
}

}  // namespace

cudaError_t LaunchObserve(const ObserveParams& params, int num_tokens, int num_kv_heads,
                          cudaStream_t stream) {
  return Launch(ObserveKernel, dim3(num_tokens, num_kv_heads), dim3(ThreadsOf(params.head_dim)), 0,
                stream, params);
}

int64_t MomentsStateBytes(int num_kv_heads, int head_dim) {
  const int64_t doubles = int64_t{num_kv_heads} * (2 * head_dim + 1);
  return doubles * int64_t{sizeof(double)} + int64_t{kMomentsWorks} * 2 * head_dim * 4;
}

MomentsState CutMomentsState(unsigned char* memory, int num_kv_heads, int head_dim) {
  MomentsState state;
  state.mean = reinterpret_cast<double*>(memory);
  state.squares = state.mean + int64_t{num_kv_heads} * head_dim;
  state.count = state.squares + int64_t{num_kv_heads} * head_dim;
  state.of_pages = reinterpret_cast<float*>(state.count + num_kv_heads);
  return state;
}

cudaError_t LaunchAddMoments(const MomentsWorks& works, int num_works, int num_kv_heads, bool first,
                             const MomentsState& state, cudaStream_t stream) {
  const StagedRows staged = StagedRowsOf(works.geometry);
  const dim3 block(ThreadsOf(works.geometry.head_dim));
  const cudaError_t error =
      WithKvElement(works.geometry.dtype, [&]<typename T>(std::type_identity<T>) {
        return Launch(PageMomentsKernel<T>, dim3(num_works), block, staged.bytes, stream, works,
                      staged.rows, state.of_pages);
      });
  if (error != cudaSuccess) return error;
  return Launch(AddMomentsKernel, dim3(num_kv_heads), block, 0, stream, works, num_works,
                first ? 1 : 0, state);
}

cudaError_t LaunchChoose(const ChooseParams& params, int num_kv_heads, cudaStream_t stream) {
  const size_t shared = params.head_dim * (sizeof(double) + sizeof(int32_t));
  return Launch(ChooseKernel, dim3(num_kv_heads), dim3(ThreadsOf(params.head_dim)), shared, stream,
                params);
}

}  // namespace heavywater::cuda
