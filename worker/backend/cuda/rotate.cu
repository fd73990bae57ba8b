// RoPE at attention, a warp per row of head_dim: its lanes take a pair at a time.
#include "worker/backend/cuda/kv_row.h"
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/rotate_kernels.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// An element as it lies in memory.
template <typename T>
struct StoredAs {
  using Bits = uint16_t;
};
template <>
struct StoredAs<float> {
  using Bits = float;
};

template <typename T>
__device__ __forceinline__ float LoadElement(const T* from) {
  const auto bits = Load(reinterpret_cast<const typename StoredAs<T>::Bits*>(from));
  if constexpr (std::is_same_v<T, float>) {
    return bits;
  } else {
    return HalfOfWord<T>(bits);
  }
}
template <typename T>
__device__ __forceinline__ void StoreElement(T* to, float value) {
  auto* bits = reinterpret_cast<typename StoredAs<T>::Bits*>(to);
  if constexpr (std::is_same_v<T, float>) {
    Store(bits, value);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    Store(bits, FloatToBFloat16Bits(value));
  } else {
    Store(bits, FloatToHalf(value));
  }
}

// `angles` null: a copy.
template <typename T>
__device__ __forceinline__ void RotateRow(const T* from, const float* angles, int head_dim, T* to) {
  const int half = head_dim / 2;
  for (int i = static_cast<int>(threadIdx.x % kWarp); i < half; i += kWarp) {
    const float first = LoadElement(from + i);
    const float second = LoadElement(from + half + i);
    const float cosine = angles == nullptr ? 1.0f : Load(angles + i);
    const float sine = angles == nullptr ? 0.0f : Load(angles + half + i);
    StoreElement(to + i, first * cosine - second * sine);
    StoreElement(to + half + i, second * cosine + first * sine);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_keys(RotateKeysPass pass) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (index >= int64_t{pass.count} * pass.heads) return;
  const auto entry = static_cast<int>(index % pass.count);
  const int kv_head = pass.first_kv_head + static_cast<int>(index / pass.count);
  const int64_t row = (kv_head * pass.capacity + pass.first_slot + entry) * pass.head_dim;
  RotateRow(reinterpret_cast<const T*>(pass.keys) + row,
            pass.angles + int64_t{Load(pass.places + entry)} * pass.head_dim, pass.head_dim,
            reinterpret_cast<T*>(pass.to) + row);
}

__global__ void __launch_bounds__(kThreads) rotate_queries(RotateQueriesPass pass) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (index >= pass.num_rows * pass.num_query_heads) return;
  const int place = Load(pass.places + index / pass.num_query_heads);
  RotateRow(pass.from + index * pass.head_dim,
            place < 0 ? nullptr : pass.angles + int64_t{place} * pass.head_dim, pass.head_dim,
            pass.to + index * pass.head_dim);
}

dim3 GridOf(int64_t rows) { return dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps)); }

}  // namespace

cudaError_t LaunchRotateKeys(KvDtype dtype, const RotateKeysPass& pass, cudaStream_t stream) {
  return WithKvElement(dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return Launch(rotate_keys<T>, GridOf(int64_t{pass.count} * pass.heads), dim3(kThreads), 0,
                  stream, pass);
  });
}

cudaError_t LaunchRotateQueries(const RotateQueriesPass& pass, cudaStream_t stream) {
  return Launch(rotate_queries, GridOf(pass.num_rows * pass.num_query_heads), dim3(kThreads), 0,
                stream, pass);
}

}  // namespace heavywater::cuda
