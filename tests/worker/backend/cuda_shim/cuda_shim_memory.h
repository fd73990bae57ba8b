// What worker/backend/cuda/device_code.h offers to kernels, on the CPU: checked for
// bounds and alignment, counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>

#include "cache_service/base/float16.h"
#include "cuda_shim.h"
#include "engine.h"
#include "memory_map.h"

namespace heavywater::cuda_shim {

extern Counters counters;

[[noreturn]] inline void FailAccess(const char* what, const void* address, size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  const char* why = reinterpret_cast<uintptr_t>(address) % bytes != 0 ? ", which is not aligned"
                                                                      : ", which is no such memory";
  FailKernel(std::string(what) + " of " + std::to_string(bytes) + " bytes at " + text + why);
}
template <typename T>
void CheckDevice(const char* what, const T* address) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0);
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0 ||
      !IsDeviceMemory(address, sizeof(T))) {
    FailAccess(what, address, sizeof(T));
  }
}
template <typename T>
void CheckHost(const char* what, const T* address) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0);
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0 || !IsPinnedRange(address, sizeof(T))) {
    FailAccess(what, address, sizeof(T));
  }
}

}  // namespace heavywater::cuda_shim

namespace heavywater::cuda {

inline unsigned char* SharedMemory() {
  return reinterpret_cast<unsigned char*>(cuda_shim::SharedArena());
}

template <typename T>
T Load(const T* address) {
  cuda_shim::CheckDevice("Load", address);
  cuda_shim::counters.loaded += sizeof(T);
  return *address;
}
template <typename T>
T LoadOnce(const T* address) {
  cuda_shim::CheckDevice("LoadOnce", address);
  cuda_shim::counters.loaded += sizeof(T);
  return *address;
}
template <typename T>
void Store(T* address, std::type_identity_t<T> value) {
  cuda_shim::CheckDevice("Store", address);
  cuda_shim::counters.stored += sizeof(T);
  *address = value;
}
template <typename T>
T LoadHost(const T* address) {
  cuda_shim::CheckHost("LoadHost", address);
  cuda_shim::counters.host_loaded += sizeof(T);
  return *address;
}
template <typename T>
void StoreHost(T* address, std::type_identity_t<T> value) {
  cuda_shim::CheckHost("StoreHost", address);
  cuda_shim::counters.host_stored += sizeof(T);
  *address = value;
}
inline void Add(int64_t* address, int64_t value) {
  cuda_shim::CheckDevice("Add", address);
  cuda_shim::counters.loaded += sizeof(int64_t);
  cuda_shim::counters.stored += sizeof(int64_t);
  // Wraps, as on the device.
  *address = static_cast<int64_t>(static_cast<uint64_t>(*address) + static_cast<uint64_t>(value));
}

inline float HalfToFloat(uint16_t bits) { return Float16ToFloat(bits); }
inline uint16_t FloatToHalf(float value) { return FloatToFloat16(value); }

}  // namespace heavywater::cuda
