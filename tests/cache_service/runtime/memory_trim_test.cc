#include "cache_service/runtime/memory_trim.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace heavywater {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBlockBytes = 8 << 10;

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// What a crowd leaves: blocks that live on between many that are free.
std::vector<std::unique_ptr<char[]>> Leftovers(int64_t bytes) {
  std::vector<std::unique_ptr<char[]>> blocks(bytes / kBlockBytes);
  for (std::unique_ptr<char[]>& block : blocks) {
    block = std::make_unique<char[]>(kBlockBytes);
    std::memset(block.get(), 1, kBlockBytes);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i % 64 != 0) blocks[i].reset();
  }
  return blocks;
}

TEST(MemoryTrimTest, GivesBackWhatACrowdHasLeft) {
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "another allocator";
#endif
  const int64_t before = ResidentBytes();
  const std::vector<std::unique_ptr<char[]>> left = Leftovers(64 * kMiB);
  ASSERT_GT(ResidentBytes(), before + 48 * kMiB) << "the allocator keeps it by itself";
  ASSERT_GT(UnusedHeapBytes(), 48 * kMiB);
  {
    const MemoryTrim keeps_more(128 * kMiB, absl::Milliseconds(5));
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_GT(ResidentBytes(), before + 48 * kMiB) << "so much may stay";
  }
  const MemoryTrim trim(8 * kMiB, absl::Milliseconds(5));
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (ResidentBytes() > before + 24 * kMiB && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_LE(ResidentBytes(), before + 24 * kMiB);
  EXPECT_EQ(left[64][kBlockBytes - 1], 1) << "what lives on is as it was";
}

}  // namespace
}  // namespace heavywater
