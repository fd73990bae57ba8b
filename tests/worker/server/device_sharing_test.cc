#include "worker/server/device_sharing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace heavywater {
namespace {

using ::testing::HasSubstr;

TEST(CheckDevicesDifferTest, NamesBothRanksAndTheDeviceTheyShare) {
  const std::vector<RankDevice> ranks = {
      {"node-a", "GPU-1"}, {"node-a", "GPU-2"}, {"node-b", "GPU-1"}, {"node-a", "GPU-2"}};
  const absl::Status status = CheckDevicesDiffer(ranks);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("ranks 1 and 3 use the same device GPU-2 of host node-a"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("allow_shared_device"));
}

TEST(CheckDevicesDifferTest, AcceptsEqualDevicesOfDifferentHosts) {
  EXPECT_TRUE(
      CheckDevicesDiffer(std::vector<RankDevice>{{"a", "GPU-1"}, {"b", "GPU-1"}, {"a", "GPU-2"}})
          .ok());
  EXPECT_TRUE(CheckDevicesDiffer(std::vector<RankDevice>{{"a", "GPU-1"}}).ok());
}

TEST(ExchangeDevicesTest, EveryRankHearsOfAllInRankOrder) {
  InProcessRendezvous store;
  std::vector<std::vector<RankDevice>> heard(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const RankDevice mine{"host", "GPU-" + std::to_string(rank % 2)};
      auto devices = ExchangeDevices(mine, {.rank = rank, .size = 3, .key_prefix = "g/7/"}, store);
      ASSERT_TRUE(devices.ok()) << devices.status();
      heard[rank] = *std::move(devices);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<RankDevice>& devices : heard) {
    ASSERT_EQ(devices.size(), 3u);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(devices[rank].host, "host");
      EXPECT_EQ(devices[rank].device, "GPU-" + std::to_string(rank % 2));
    }
    EXPECT_THAT(std::string(CheckDevicesDiffer(devices).message()), HasSubstr("ranks 0 and 2"));
  }
  EXPECT_TRUE(store.Wait("g/7/device/0", absl::ZeroDuration()).ok());
}

TEST(ExchangeDevicesTest, NamesTheRankThatDoesNotCome) {
  InProcessRendezvous store;
  const absl::Status status =
      ExchangeDevices({"host", "GPU-0"}, {.size = 2, .timeout = absl::Milliseconds(20)}, store)
          .status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("device/1"));
}

TEST(ExchangeDevicesTest, RefusesIdentitiesThatCouldBeMistaken) {
  InProcessRendezvous store;
  for (const RankDevice& mine : {RankDevice{"a\nb", "GPU-0"}, RankDevice{"a", "GPU\n"},
                                 RankDevice{"a", std::string(300, 'x')}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ExchangeDevices(mine, {}, store).status()));
  }
}

TEST(HostIdentityTest, IsTheSameWheneverItIsAsked) {
  const absl::StatusOr<std::string> identity = HostIdentity();
  ASSERT_TRUE(identity.ok()) << identity.status();
  EXPECT_GE(identity->size(), 32u);
  EXPECT_EQ(*HostIdentity(), *identity);
}

}  // namespace
}  // namespace heavywater
