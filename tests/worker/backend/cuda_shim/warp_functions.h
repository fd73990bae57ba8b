// Barriers, warp functions and atomics.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"

inline constexpr int warpSize = 32;

inline void __syncthreads() {
  heavywater::cuda_shim::StopAt(heavywater::cuda_shim::Stop::kSyncThreads);
}
inline int __syncthreads_count(int predicate) {
  return heavywater::cuda_shim::BlockReduce(heavywater::cuda_shim::Stop::kSyncThreadsCount,
                                            predicate);
}
inline int __syncthreads_and(int predicate) {
  return heavywater::cuda_shim::BlockReduce(heavywater::cuda_shim::Stop::kSyncThreadsAnd,
                                            predicate);
}
inline int __syncthreads_or(int predicate) {
  return heavywater::cuda_shim::BlockReduce(heavywater::cuda_shim::Stop::kSyncThreadsOr, predicate);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  heavywater::cuda_shim::CheckMask(mask);
  heavywater::cuda_shim::StopAt(heavywater::cuda_shim::Stop::kSyncWarp);
}
// Threads take turns at their stops only: nothing is reordered in between.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace heavywater::cuda_shim {

// All lanes' values, once all have arrived.
template <typename T>
const uint64_t* Exchange(Stop stop, unsigned mask, T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  CheckMask(mask);
  Warp& warp = *running.warp;
  uint64_t* values = warp.values[warp.generation];
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  values[running.lane] = bits;
  StopAt(stop);
  return values;
}
template <typename T>
T ValueOf(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Lanes' values of up to kGatherBytes each: for instructions that a whole warp
// performs, as matrix products. Element i is lane i's.
template <typename T>
struct Gathered {
  const std::byte (*lanes)[kGatherBytes];
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, lanes[lane], sizeof(T));
    return value;
  }
};
template <typename T>
Gathered<T> GatherLanes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kGatherBytes);
  CheckMask(0xffffffffu);
  Warp& warp = *running.warp;
  auto* lanes = warp.wide[warp.generation];
  std::memcpy(lanes[running.lane], &value, sizeof(T));
  StopAt(Stop::kGather);
  return {lanes};
}

inline unsigned Vote(unsigned mask, bool predicate) {
  CheckMask(mask);
  Warp& warp = *running.warp;
  unsigned& votes = warp.votes[warp.generation];
  votes |= (predicate ? 1u : 0u) << running.lane;
  StopAt(Stop::kVote);
  return votes;
}

template <typename T, typename Combine>
T ReduceLanes(unsigned mask, T value, Combine combine) {
  const uint64_t* values = Exchange(Stop::kReduce, mask, value);
  T result = ValueOf<T>(values[0]);
  for (int lane = 1; lane < kWarpSize; ++lane) result = combine(result, ValueOf<T>(values[lane]));
  return result;
}

}  // namespace heavywater::cuda_shim

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = heavywater::cuda_shim::running.lane;
  const uint64_t* values =
      heavywater::cuda_shim::Exchange(heavywater::cuda_shim::Stop::kShuffle, mask, value);
  return heavywater::cuda_shim::ValueOf<T>(values[(lane & ~(width - 1)) | (source & (width - 1))]);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = heavywater::cuda_shim::running.lane;
  const uint64_t* values =
      heavywater::cuda_shim::Exchange(heavywater::cuda_shim::Stop::kShuffle, mask, value);
  const int source = lane - static_cast<int>(delta);
  return heavywater::cuda_shim::ValueOf<T>(values[source < (lane & ~(width - 1)) ? lane : source]);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = heavywater::cuda_shim::running.lane;
  const uint64_t* values =
      heavywater::cuda_shim::Exchange(heavywater::cuda_shim::Stop::kShuffle, mask, value);
  const int source = lane + static_cast<int>(delta);
  return heavywater::cuda_shim::ValueOf<T>(values[source > (lane | (width - 1)) ? lane : source]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = heavywater::cuda_shim::running.lane;
  const uint64_t* values =
      heavywater::cuda_shim::Exchange(heavywater::cuda_shim::Stop::kShuffle, mask, value);
  const int source = lane ^ bits;
  return heavywater::cuda_shim::ValueOf<T>(values[source > (lane | (width - 1)) ? lane : source]);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return heavywater::cuda_shim::Vote(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return heavywater::cuda_shim::Vote(mask, predicate != 0) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return heavywater::cuda_shim::Vote(mask, predicate != 0) == 0xffffffffu ? 1 : 0;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* values =
      heavywater::cuda_shim::Exchange(heavywater::cuda_shim::Stop::kMatch, mask, value);
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (heavywater::cuda_shim::ValueOf<T>(values[lane]) == value) same |= 1u << lane;
  }
  return same;
}

inline int __reduce_add_sync(unsigned mask, int value) {
  return static_cast<int>(heavywater::cuda_shim::ReduceLanes(
      mask, static_cast<unsigned>(value), [](unsigned a, unsigned b) { return a + b; }));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a + b; });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](int a, int b) { return a > b ? a : b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline int __reduce_min_sync(unsigned mask, int value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](int a, int b) { return a < b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
  return heavywater::cuda_shim::ReduceLanes(mask, value,
                                            [](unsigned a, unsigned b) { return a ^ b; });
}

// Atomics, of shared memory as a rule: of global memory kernels use Add().
template <typename T, typename U>
T HwShimAtomic(T* address, U value) {
  const T old = *address;
  *address = value(old);
  return old;
}
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return static_cast<T>(old - value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return old > value ? old : value; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return old < value ? old : value; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return static_cast<T>(old | value); });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return static_cast<T>(old & value); });
}
template <typename T>
T atomicXor(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return static_cast<T>(old ^ value); });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return HwShimAtomic(address, [&](T old) { return old == expected ? value : old; });
}
