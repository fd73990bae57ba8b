#include "worker/backend/cuda/device_code.h"
#include "worker/backend/cuda/launch.h"
#include "worker/model/cuda/llama_kernels.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

unsigned BlocksFor(int64_t size) { return static_cast<unsigned>((size + kThreads - 1) / kThreads); }

// This thread's element of a grid of kThreads each.
__device__ __forceinline__ int64_t Element() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(uint16_t bits) { return BFloat16ToFloat(bits); }

__device__ __forceinline__ void StoreAs(float* address, float value) { Store(address, value); }
__device__ __forceinline__ void StoreAs(uint16_t* address, float value) {
  Store(address, FloatToBFloat16Bits(value));
}

// The sum over the block, in every thread; the same in every run.
__device__ __forceinline__ float BlockSum(float value) {
  float* const sums = reinterpret_cast<float*>(SharedMemory());  // [kWarps]
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  return total;
}

template <typename T>
__global__ void EmbedKernel(const T* embedding, const int32_t* rows, int64_t width, float* out) {
  const int32_t row = Load(rows + blockIdx.x);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float value = row < 0 ? 0.0f : ToFloat(Load(embedding + row * width + i));
    Store(out + blockIdx.x * width + i, value);
  }
}

template <typename T>
__global__ void RmsNormKernel(const float* x, const float* weight, float epsilon, int64_t width,
                              T* out) {
  x += blockIdx.x * width;
  out += blockIdx.x * width;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float value = Load(x + i);
    sum += value * value;
  }
  const float mean = BlockSum(sum) / static_cast<float>(width);
  const float factor = 1.0f / sqrtf(mean + epsilon);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    StoreAs(out + i, Load(x + i) * factor * Load(weight + i));
  }
}

__global__ void AddRowKernel(const float* row, int64_t size, int64_t width, float* x) {
  const int64_t i = Element();
  if (i < size) Store(x + i, Load(x + i) + Load(row + i % width));
}

// A block per token and head.
__global__ void NormHeadsKernel(NormHeadsParams params) {
  const int64_t heads = params.q_heads + params.kv_heads;
  const int64_t head = blockIdx.x % heads;
  float* const x = params.qkv + blockIdx.x / heads * params.stride + head * params.head_dim;
  const float* const weight = head < params.q_heads ? params.q_norm : params.k_norm;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < params.head_dim; i += kThreads) {
    const float value = Load(x + i);
    sum += value * value;
  }
  const float mean = BlockSum(sum) / static_cast<float>(params.head_dim);
  const float factor = 1.0f / sqrtf(mean + params.epsilon);
  for (int64_t i = threadIdx.x; i < params.head_dim; i += kThreads) {
    Store(x + i, Load(x + i) * factor * Load(weight + i));
  }
}

template <typename T>
__global__ void ConvertKernel(const float* x, int64_t size, T* out) {
  const int64_t i = Element();
  if (i < size) StoreAs(out + i, Load(x + i));
}

// A block per token; a thread turns a pair, or copies two elements of V.
__global__ void RotateKernel(RotateParams params) {
  const int64_t token = blockIdx.x;
  const int64_t half = params.head_dim / 2;
  const int64_t q_pairs = params.q_width / 2;
  const int64_t kv_pairs = params.kv_width / 2;
  const float* const row = params.qkv + token * (params.q_width + 2 * params.kv_width);
  for (int64_t pair = threadIdx.x; pair < q_pairs + 2 * kv_pairs; pair += kThreads) {
    // Where the pair's head begins in the row, and which pair of the head it is.
    const int64_t head = pair / half * params.head_dim;
    const int64_t i = pair % half;
    const float first = Load(row + head + i);
    const float second = Load(row + head + half + i);
    if (pair >= q_pairs + kv_pairs) {
      float* const v = params.v + token * params.kv_width + head - params.q_width - params.kv_width;
      Store(v + i, first);
      Store(v + half + i, second);
      continue;
    }
    float* const to = pair < q_pairs ? params.q + token * params.q_width + head
                                     : params.k + token * params.kv_width + head - params.q_width;
    const float cosine = Load(params.cosines + token * half + i);
    const float sine = Load(params.sines + token * half + i);
    Store(to + i, first * cosine - second * sine);
    Store(to + half + i, second * cosine + first * sine);
  }
}

template <typename T>
__global__ void SiluMultiplyKernel(const float* gate_up, int64_t size, int64_t width, T* out) {
  const int64_t i = Element();
  if (i >= size) return;
  const float* const gate = gate_up + i / width * 2 * width + i % width;
  const float value = Load(gate);
  StoreAs(out + i, value / (1.0f + expf(-value)) * Load(gate + width));
}

__global__ void AddKernel(const float* x, int64_t size, float* sum) {
  const int64_t i = Element();
  if (i < size) Store(sum + i, Load(sum + i) + Load(x + i));
}

__global__ void PlaceKernel(PlaceParams params) {
  const int64_t i = Element();
  if (i >= params.tokens * params.width) return;
  const int64_t token = i / params.width;
  const int64_t column = i % params.width;
  Store(params.to + token * params.to_stride + params.begin + column,
        Load(params.from + token * params.from_stride + column));
}

// Calls launch(memory as the type's elements).
template <typename Launcher>
cudaError_t WithType(WeightType type, void* memory, const Launcher& launch) {
  if (type == WeightType::kFloat32) return launch(static_cast<float*>(memory));
  return launch(static_cast<uint16_t*>(memory));
}

}  // namespace

cudaError_t EmbedRows(const void* embedding, WeightType type, const int32_t* rows, int64_t tokens,
                      int64_t width, float* out, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(tokens));
  if (type == WeightType::kFloat32) {
    return Launch(EmbedKernel<float>, grid, dim3(kThreads), 0, stream,
                  static_cast<const float*>(embedding), rows, width, out);
  }
  return Launch(EmbedKernel<uint16_t>, grid, dim3(kThreads), 0, stream,
                static_cast<const uint16_t*>(embedding), rows, width, out);
}

cudaError_t RmsNorm(const float* x, const float* weight, float epsilon, int64_t tokens,
                    int64_t width, WeightType type, void* out, cudaStream_t stream) {
  return WithType(type, out, [&]<typename T>(T* to) {
    return Launch(RmsNormKernel<T>, dim3(static_cast<unsigned>(tokens)), dim3(kThreads),
                  kWarps * sizeof(float), stream, x, weight, epsilon, width, to);
  });
}

cudaError_t Convert(const float* x, int64_t size, WeightType type, void* out, cudaStream_t stream) {
  return WithType(type, out, [&]<typename T>(T* to) {
    return Launch(ConvertKernel<T>, dim3(BlocksFor(size)), dim3(kThreads), 0, stream, x, size, to);
  });
}

cudaError_t AddRow(const float* row, int64_t tokens, int64_t width, float* x, cudaStream_t stream) {
  const int64_t size = tokens * width;
  return Launch(AddRowKernel, dim3(BlocksFor(size)), dim3(kThreads), 0, stream, row, size, width,
                x);
}

cudaError_t NormHeads(const NormHeadsParams& params, cudaStream_t stream) {
  const int64_t blocks = params.tokens * (params.q_heads + params.kv_heads);
  return Launch(NormHeadsKernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                kWarps * sizeof(float), stream, params);
}

cudaError_t RotateQkv(const RotateParams& params, cudaStream_t stream) {
  return Launch(RotateKernel, dim3(static_cast<unsigned>(params.tokens)), dim3(kThreads), 0, stream,
                params);
}

cudaError_t SiluMultiply(const float* gate_up, int64_t tokens, int64_t width, WeightType type,
                         void* out, cudaStream_t stream) {
  const int64_t size = tokens * width;
  return WithType(type, out, [&]<typename T>(T* to) {
    return Launch(SiluMultiplyKernel<T>, dim3(BlocksFor(size)), dim3(kThreads), 0, stream, gate_up,
                  size, width, to);
  });
}

cudaError_t AddTo(const float* x, int64_t size, float* sum, cudaStream_t stream) {
  return Launch(AddKernel, dim3(BlocksFor(size)), dim3(kThreads), 0, stream, x, size, sum);
}

cudaError_t PlaceColumns(const PlaceParams& params, cudaStream_t stream) {
  return Launch(PlaceKernel, dim3(BlocksFor(params.tokens * params.width)), dim3(kThreads), 0,
                stream, params);
}

}  // namespace heavywater::cuda
