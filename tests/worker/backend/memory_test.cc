// Allocation and copies.
#include <algorithm>
#include <limits>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

TEST_P(BackendTest, AllocatedMemoryIsZero) {
  const DeviceBuffer buffer = backend().Allocate(1000).value();
  EXPECT_EQ(buffer.bytes(), 1000);
  EXPECT_EQ(Download<std::byte>(backend(), buffer), std::vector<std::byte>(1000));
}

TEST_P(BackendTest, AnEmptyBufferIsFine) {
  EXPECT_EQ(backend().Allocate(0).value().As<int64_t>().size(), 0);
}

TEST_P(BackendTest, MoreMemoryThanThereIsIsResourceExhausted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the process at an allocation of this size";
#endif
  const auto buffer = backend().Allocate(std::numeric_limits<int64_t>::max() / 2);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_P(BackendTest, ANegativeSizeIsInvalid) {
  EXPECT_EQ(backend().Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(BackendTest, CopiesMovePartsOfABuffer) {
  const DeviceBuffer from = Upload(backend(), std::vector<int32_t>{1, 2, 3, 4});
  const DeviceBuffer to = Upload(backend(), std::vector<int32_t>{5, 6, 7, 8});
  Stream stream;
  ASSERT_TRUE(
      backend().CopyOnDevice(to.As<std::byte>(4, 8), from.As<std::byte>(8, 8), stream).ok());
  EXPECT_EQ(Download<int32_t>(backend(), to), (std::vector<int32_t>{5, 3, 4, 8}));
}

TEST_P(BackendTest, ZeroClearsOnlyItsSpan) {
  const DeviceBuffer buffer = Upload(backend(), std::vector<int32_t>{1, 2, 3, 4});
  Stream stream;
  ASSERT_TRUE(backend().Zero(buffer.As<std::byte>(4, 8), stream).ok());
  EXPECT_EQ(Download<int32_t>(backend(), buffer), (std::vector<int32_t>{1, 0, 0, 4}));
}

}  // namespace
}  // namespace heavywater
