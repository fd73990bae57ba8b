#include "worker/backend/host_buffer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace heavywater {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

uintptr_t AddressOf(const DeviceBuffer& buffer) {
  return reinterpret_cast<uintptr_t>(buffer.As<std::byte>().device_address());
}

int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(HostBufferTest, SmallBuffersAreAlignedToACacheLine) {
  for (const int64_t bytes : {int64_t{1}, int64_t{100}, 2 * kMiB - 1}) {
    EXPECT_EQ(AddressOf(AllocateHostBuffer(bytes).value()) % 64, 0u) << bytes;
  }
}

TEST(HostBufferTest, LargeBuffersBeginAtAHugePageAndAreZero) {
  for (const int64_t bytes : {2 * kMiB, 3 * kMiB + 5, 9 * kMiB}) {
    const DeviceBuffer buffer = AllocateHostBuffer(bytes).value();
    EXPECT_EQ(AddressOf(buffer) % (2 * kMiB), 0u) << bytes;
    const auto all = buffer.As<std::byte>();
    EXPECT_EQ(all.size(), bytes);
    EXPECT_EQ(std::count(all.device_address(), all.device_address() + bytes, std::byte{0}), bytes);
  }
}

TEST(HostBufferTest, ALargeBufferIsResidentAndGoesBackToTheSystemAtOnce) {
  const int64_t before = ResidentBytes();
  {
    const DeviceBuffer buffer = AllocateHostBuffer(64 * kMiB).value();
    EXPECT_GT(ResidentBytes() - before, 60 * kMiB);
  }
  EXPECT_LT(ResidentBytes() - before, 8 * kMiB);
}

}  // namespace
}  // namespace heavywater
