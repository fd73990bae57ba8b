#include "worker/cache/device_memory.h"

#include <limits>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class DeviceMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = CreateReferenceBackend();
  DeviceMemory memory_{*backend_, 1000};
};

TEST_F(DeviceMemoryTest, ReservesUpToItsLimitAndGivesBack) {
  {
    DeviceMemory::Reservation all = *memory_.Reserve(1000, "all");
    EXPECT_EQ(memory_.free_bytes(), 0);
    EXPECT_FALSE(memory_.Reserve(1, "more").ok());
  }
  EXPECT_EQ(memory_.reserved_bytes(), 0);
}

TEST_F(DeviceMemoryTest, ARefusalNamesNeedLimitAndWhatIsInUse) {
  const DeviceMemory::Reservation some = *memory_.Reserve(600, "some");
  const absl::Status status = memory_.Reserve(401, "sequence 7").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("sequence 7 needs 401 bytes of device memory, limit 1000, in use 600"));
}

TEST_F(DeviceMemoryTest, AReservationMovesWithItsBytes) {
  DeviceMemory::Reservation first = *memory_.Reserve(300, "first");
  DeviceMemory::Reservation second = std::move(first);
  EXPECT_EQ(second.bytes(), 300);
  EXPECT_EQ(memory_.reserved_bytes(), 300);
  second = DeviceMemory::Reservation();
  EXPECT_EQ(memory_.reserved_bytes(), 0);
}

TEST_F(DeviceMemoryTest, AReservationGrowsWithinTheLimitAndShrinks) {
  DeviceMemory::Reservation reservation = *memory_.Reserve(300, "first");
  EXPECT_FALSE(reservation.Extend(1001, "more").ok());
  EXPECT_EQ(memory_.reserved_bytes(), 300);
  EXPECT_TRUE(reservation.Extend(1000, "more").ok());
  reservation.Resize(10);
  EXPECT_EQ(memory_.reserved_bytes(), 10);
}

TEST_F(DeviceMemoryTest, CountsWhatIsAllocatedByKindWithPeaks) {
  const DeviceMemory::Reservation reservation = *memory_.Reserve(500, "all");
  {
    const DeviceBuffer slots = *memory_.Allocate(MemoryKind::kSlots, 100);
    const DeviceBuffer scores = *memory_.Allocate(MemoryKind::kScores, 50);
    const DeviceBuffer work = *memory_.Allocate(MemoryKind::kWorkspace, 300);
    EXPECT_EQ(memory_.gauge(MemoryKind::kSlots).current_bytes, 100);
    EXPECT_EQ(memory_.kv_gauge().current_bytes, 150);
  }
  EXPECT_EQ(memory_.gauge(MemoryKind::kSlots).current_bytes, 0);
  EXPECT_EQ(memory_.gauge(MemoryKind::kSlots).peak_bytes, 100);
  EXPECT_EQ(memory_.kv_gauge().current_bytes, 0);
  EXPECT_EQ(memory_.kv_gauge().peak_bytes, 150);
}

TEST_F(DeviceMemoryTest, AllocatesNoMoreThanIsReserved) {
  const DeviceMemory::Reservation reservation = *memory_.Reserve(100, "all");
  const DeviceBuffer most = *memory_.Allocate(MemoryKind::kSlots, 80);
  EXPECT_EQ(memory_.Allocate(MemoryKind::kSlots, 21).status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(memory_.Allocate(MemoryKind::kSlots, 20).ok());
}

TEST_F(DeviceMemoryTest, HiddenStatesOfAPromptAreCountedOutsideTheLimit) {
  const DeviceBuffer hidden = *memory_.Allocate(MemoryKind::kPromptHidden, 5000);
  EXPECT_EQ(memory_.gauge(MemoryKind::kPromptHidden).current_bytes, 5000);
  EXPECT_EQ(memory_.kv_gauge().current_bytes, 0);
  EXPECT_EQ(memory_.free_bytes(), 1000);
}

TEST_F(DeviceMemoryTest, WithoutALimitEverythingFits) {
  DeviceMemory unlimited(*backend_, 0);
  EXPECT_EQ(unlimited.free_bytes(), std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(unlimited.Reserve(int64_t{1} << 50, "much").ok());
}

}  // namespace
}  // namespace heavywater
