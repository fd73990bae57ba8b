#include "memory_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_shim.h"
#include "random.h"

namespace heavywater::cuda_shim {

uintptr_t device_base = ~uintptr_t{0} - kDeviceBytes;
uint8_t* device_shadow = nullptr;

namespace {

constexpr int64_t kAlignment = 256;  // as cudaMalloc's
constexpr int64_t kGuardBytes = 256;
constexpr std::byte kGuard{0xa5};

struct HostRange {
  int64_t bytes = 0;
  bool registered = false;
};

// Addresses are handed out in a ring, so that one that was freed stays invalid for
// long: a kernel that uses it is found.
struct DeviceMap {
  std::map<uintptr_t, int64_t> allocations;
  uintptr_t cursor = 0;
  int64_t allocated = 0;
};

DeviceMap& Device() {
  static auto* map = new DeviceMap;
  return *map;
}
std::map<uintptr_t, HostRange>& Host() {
  static auto* map = new std::map<uintptr_t, HostRange>;
  return *map;
}

int64_t Rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
// With the guards behind it.
int64_t Footprint(int64_t bytes) { return Rounded(bytes) + kGuardBytes; }

void* Reserve(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) return memory;
  std::perror("cuda_shim: addresses of the device");
  std::abort();
}

void MapDevice() {
  if (device_shadow != nullptr) return;
  // Shared between processes it could not be: a fork has its own.
  device_shadow = static_cast<uint8_t*>(Reserve(kDeviceBytes / kGranuleBytes));
  device_base = reinterpret_cast<uintptr_t>(Reserve(kDeviceBytes));
  Device().cursor = device_base;
}

// First gap of `footprint` bytes from the cursor on.
uintptr_t FindGap(int64_t footprint) {
  DeviceMap& map = Device();
  uintptr_t at = map.cursor;
  for (int laps = 0; laps < 2;) {
    if (at + footprint > device_base + kDeviceBytes) {
      at = device_base;
      ++laps;
      continue;
    }
    auto next = map.allocations.upper_bound(at);
    if (next != map.allocations.begin()) {
      const auto& [start, bytes] = *std::prev(next);
      if (start + Footprint(bytes) > at) {
        at = start + Footprint(bytes);
        continue;
      }
    }
    if (next == map.allocations.end() || at + footprint <= next->first) return at;
    at = next->first + Footprint(next->second);
  }
  return 0;
}

void SetShadow(uintptr_t start, int64_t bytes, bool valid) {
  uint8_t* shadow = device_shadow + (start - device_base) / kGranuleBytes;
  std::memset(shadow, valid ? kGranuleBytes : 0, bytes / kGranuleBytes);
  if (bytes % kGranuleBytes != 0) {
    shadow[bytes / kGranuleBytes] = valid ? static_cast<uint8_t>(bytes % kGranuleBytes) : 0;
  }
}

std::string DamageOf(uintptr_t start, int64_t bytes) {
  const auto* memory = reinterpret_cast<const std::byte*>(start);
  for (int64_t i = bytes; i < Footprint(bytes); ++i) {
    if (memory[i] == kGuard) continue;
    return "byte " + std::to_string(i) + " of an allocation of " + std::to_string(bytes) +
           " bytes of device memory was written";
  }
  return {};
}

}  // namespace

bool IsDeviceRange(const void* address, int64_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  auto next = Device().allocations.upper_bound(start);
  if (bytes == 0) return true;
  if (next == Device().allocations.begin()) return false;
  const auto& [first, size] = *std::prev(next);
  return start + bytes <= first + size;
}

void* AllocateDevice(int64_t bytes) {
  MapDevice();
  DeviceMap& map = Device();
  if (bytes < 0 || bytes > CurrentOptions().device_memory_bytes - map.allocated) return nullptr;
  const uintptr_t start = FindGap(Footprint(bytes));
  if (start == 0) return nullptr;
  map.allocations[start] = bytes;
  map.allocated += bytes;
  map.cursor = start + Footprint(bytes);
  auto* memory = reinterpret_cast<std::byte*>(start);
  Random(CurrentOptions().seed ^ start)
      .Fill(CurrentOptions().poison == Poison::kRandom, memory, bytes);
  std::fill_n(memory + bytes, Footprint(bytes) - bytes, kGuard);
  SetShadow(start, bytes, true);
  return memory;
}

bool FreeDevice(void* address, std::string& damage) {
  DeviceMap& map = Device();
  const auto found = map.allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == map.allocations.end()) return false;
  const auto [start, bytes] = *found;
  damage = DamageOf(start, bytes);
  SetShadow(start, bytes, false);
  map.allocated -= bytes;
  map.allocations.erase(found);
  // Whole pages go back to the host; what reads them later finds zeros.
  const uintptr_t first = (start + 4095) / 4096 * 4096;
  const uintptr_t end = (start + Rounded(bytes)) / 4096 * 4096;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  return true;
}

int64_t DeviceBytesAllocated() { return Device().allocated; }

std::string FindDamage() {
  for (const auto& [start, bytes] : Device().allocations) {
    if (std::string damage = DamageOf(start, bytes); !damage.empty()) return damage;
  }
  return {};
}

void* AllocateHost(int64_t bytes) {
  const int64_t rounded = (bytes + 4095) / 4096 * 4096;
  void* memory = std::aligned_alloc(4096, rounded);
  if (memory == nullptr) return nullptr;
  Host()[reinterpret_cast<uintptr_t>(memory)] = {.bytes = bytes, .registered = false};
  return memory;
}

bool FreeHost(void* address) {
  const auto found = Host().find(reinterpret_cast<uintptr_t>(address));
  if (found == Host().end() || found->second.registered) return false;
  Host().erase(found);
  std::free(address);
  return true;
}

bool RegisterHost(void* address, int64_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const auto next = Host().lower_bound(start);
  if (next != Host().end() && next->first < start + bytes) return false;
  if (next != Host().begin()) {
    const auto& [first, range] = *std::prev(next);
    if (first + range.bytes > start) return false;
  }
  Host()[start] = {.bytes = bytes, .registered = true};
  return true;
}

bool UnregisterHost(void* address) {
  const auto found = Host().find(reinterpret_cast<uintptr_t>(address));
  if (found == Host().end() || !found->second.registered) return false;
  Host().erase(found);
  return true;
}

bool IsPinnedRange(const void* address, int64_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const auto next = Host().upper_bound(start);
  if (next == Host().begin()) return false;
  const auto& [first, range] = *std::prev(next);
  return start + bytes <= first + range.bytes;
}

}  // namespace heavywater::cuda_shim
