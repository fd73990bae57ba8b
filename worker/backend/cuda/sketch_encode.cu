// EncodePages: a block of threads for each KV head and page.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/sketch_keys.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;  // also the largest head
constexpr int kGroup = 8;      // channels whose codes lie together
constexpr int kBlock = 16;     // positions whose codes do

// What a page's codes are made with, in shared memory.
struct Scales {
  int32_t* chosen;       // [channels]
  float* minima;         // [channels] as stored
  float* inverse_steps;  // [channels] 0: constant
};

__device__ Scales CutScales(unsigned char* shared, int channels) {
  auto* chosen = reinterpret_cast<int32_t*>(shared);
  auto* minima = reinterpret_cast<float*>(chosen + channels);
  return {chosen, minima, minima + channels};
}

// Minimum and step of a chosen channel, the mean of another: one thread for each.
template <typename T>
__device__ void ScaleChannel(const SketchGeometry& geometry, const PageKeys<T>& keys, int count,
                             int channel, const Scales& scales, unsigned char* sketch) {
  float minimum = keys.Key(0, channel);
  float maximum = minimum;
  float sum = minimum;
  for (int row = 1; row < count; ++row) {
    const float key = keys.Key(row, channel);
    minimum = Least(minimum, key);
    maximum = Largest(maximum, key);
    sum = Plus(sum, key);
  }
  int index = 0;  // of the chosen channels, the first that is not below
  while (index < geometry.channels && scales.chosen[index] < channel) ++index;
  if (index == geometry.channels || scales.chosen[index] != channel) {
    auto* means = reinterpret_cast<uint16_t*>(sketch + geometry.means_offset);
    const float mean = Over(sum, static_cast<float>(count));
    Store(means + (channel - index), FloatToHalfSaturated(mean));
    return;
  }
  const uint16_t stored = FloatToHalfSaturated(minimum);
  minimum = HalfToFloat(stored);
  const float largest = Least(Largest(maximum, -kLargestHalf), kLargestHalf);
  const uint16_t step = FloatToHalfSaturated(Largest(0.0f, Over(Plus(largest, -minimum), 15.0f)));
  const float width = HalfToFloat(step);
  scales.minima[index] = minimum;
  scales.inverse_steps[index] = width > 0 ? Over(1.0f, width) : 0.0f;
  Store(reinterpret_cast<uint16_t*>(sketch + geometry.minima_offset) + index, stored);
  Store(reinterpret_cast<uint16_t*>(sketch + geometry.steps_offset) + index, step);
}

template <typename T>
__device__ uint32_t Code(const PageKeys<T>& keys, const Scales& scales, int row, int index) {
  const float offset = Plus(keys.Key(row, scales.chosen[index]), -scales.minima[index]);
  const float code = Plus(Times(offset, scales.inverse_steps[index]), 0.5f);
  return static_cast<uint32_t>(Least(15.5f, Largest(0.0f, code)));
}

// Four bytes of codes: of one position and eight channels.
template <typename T>
__device__ uint32_t CodeWord(const PageKeys<T>& keys, const Scales& scales, int row, int group) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = Code(keys, scales, row, group * kGroup + i);
    const uint32_t high = Code(keys, scales, row, group * kGroup + 4 + i);
    word |= (low | high << 4) << (8 * i);
  }
  return word;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) EncodeKernel(EncodeWorks works, int num_staged) {
  const SketchGeometry& geometry = works.geometry;
  const EncodeWork& work = works.work[blockIdx.x];
  unsigned char* shared = SharedMemory();
  const Scales scales = CutScales(shared, geometry.channels);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < geometry.channels; i += kThreads) {
    scales.chosen[i] = Load(works.channels + int64_t{work.kv_head} * geometry.channels + i);
  }
  const int scale_bytes = (geometry.channels * 12 + 15) & ~15;
  const PageKeys<T> keys =
      StageKeys<T>(work.rows, work.count, num_staged, geometry.head_dim, shared + scale_bytes);
  if (thread < geometry.head_dim) {
    ScaleChannel(geometry, keys, work.count, thread, scales, work.sketch);
  }
  __syncthreads();
  // Rows that do not count yet, and what pads the page, are zero.
  const int groups = geometry.channels / kGroup;
  auto* codes = reinterpret_cast<uint32_t*>(work.sketch);
  for (int i = thread; i < geometry.page_tokens * groups; i += kThreads) {
    const int row = i / kBlock / groups * kBlock + i % kBlock;
    const int group = i / kBlock % groups;
    Store(codes + i, row < work.count ? CodeWord(keys, scales, row, group) : 0u);
  }
  const int end = geometry.means_offset + 2 * (geometry.head_dim - geometry.channels);
  for (int i = end + thread; i < geometry.page_bytes; i += kThreads) {
    Store(work.sketch + i, static_cast<unsigned char>(0));
  }
}

}  // namespace

cudaError_t LaunchEncode(const EncodeWorks& works, int num_works, cudaStream_t stream) {
  const StagedRows staged = StagedRowsOf(works.geometry);
  const size_t shared = ((works.geometry.channels * 12 + 15) & ~15) + staged.bytes;
  const dim3 grid(num_works);
  return WithKvElement(works.geometry.dtype, [&]<typename T>(std::type_identity<T>) {
    return Launch(EncodeKernel<T>, grid, dim3(kThreads), shared, stream, works, staged.rows);
  });
}

}  // namespace heavywater::cuda
