// The memory that kernels may touch: one range of addresses stands for all devices;
// and host memory that was allocated for them or registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace heavywater::cuda_shim {

// How much of a granule of device memory belongs to an allocation, from its start.
inline constexpr int kGranuleBytes = 16;
inline constexpr uintptr_t kDeviceBytes = uintptr_t{1} << 36;  // of addresses, not of memory

// For the inlined check; set by the first allocation.
extern uintptr_t device_base;
extern uint8_t* device_shadow;

// `bytes` divides 16, the address is aligned to it, so they lie in one granule.
inline bool IsDeviceMemory(const void* address, int bytes) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - device_base;
  if (offset >= kDeviceBytes) return false;
  return device_shadow[offset / kGranuleBytes] >= static_cast<int>(offset % kGranuleBytes) + bytes;
}
// Of any size and alignment.
bool IsDeviceRange(const void* address, int64_t bytes);
// Any address of the device's, allocated or not.
inline bool IsDeviceAddress(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - device_base < kDeviceBytes;
}

// Null when the device is full. Holds poison.
void* AllocateDevice(int64_t bytes);
// False when `address` is no allocation. `damage` says what lies overwritten beside it.
bool FreeDevice(void* address, std::string& damage);
int64_t DeviceBytesAllocated();
std::string FindDamage();

// Host memory. Registration fails when a part of the range is registered already.
void* AllocateHost(int64_t bytes);
bool FreeHost(void* address);
bool RegisterHost(void* address, int64_t bytes);
bool UnregisterHost(void* address);
bool IsPinnedRange(const void* address, int64_t bytes);

}  // namespace heavywater::cuda_shim
