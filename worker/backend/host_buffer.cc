#include "worker/backend/host_buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

DeviceBuffer FromHeap(int64_t bytes) {
  void* address = nullptr;
  if (posix_memalign(&address, kAlignment, static_cast<size_t>(bytes)) != 0) return {};
  return {static_cast<std::byte*>(address), bytes, [](std::byte* memory) { std::free(memory); }};
}

// A mapping of its own: the heap hands out again what it has touched in small pages, and those
// stay small.
DeviceBuffer FromHugePages(int64_t bytes) {
  if (bytes > std::numeric_limits<int64_t>::max() - kHugePageBytes) return {};
  const auto mapped_bytes = static_cast<size_t>(bytes + kHugePageBytes);
  void* const mapped =
      mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {};
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes);
  std::byte* const address = static_cast<std::byte*>(mapped) + (kHugePageBytes - past);
  // Where the system has no huge pages to give, small ones do.
  madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return {address, bytes, [mapped, mapped_bytes](std::byte*) { munmap(mapped, mapped_bytes); }};
}

}  // namespace

absl::StatusOr<DeviceBuffer> AllocateHostBuffer(int64_t bytes) {
  DeviceBuffer buffer = bytes < kHugePageBytes ? FromHeap(bytes) : FromHugePages(bytes);
  if (buffer.bytes() == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the host has no ", bytes, " bytes left for a device buffer"));
  }
  std::memset(buffer.As<std::byte>().device_address(), 0, static_cast<size_t>(bytes));
  return buffer;
}

}  // namespace heavywater
