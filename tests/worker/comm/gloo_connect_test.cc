// How Gloo groups form: addresses, disagreement, ranks that never come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/worker/comm/rank_group.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

std::vector<absl::Status> TryToConnect(const std::vector<GlooOptions>& ranks) {
  InProcessRendezvous store;
  std::vector<absl::Status> statuses(ranks.size());
  RunOnThreads(static_cast<int>(ranks.size()), [&](int index) {
    statuses[index] = CreateGlooCommunicator(ranks[index], store).status();
  });
  return statuses;
}

TEST(GlooConnectTest, RanksOnDifferentAddressesFormAGroup) {
  RankGroup group({CommKind::kGloo, 3}, absl::Seconds(30), {"127.0.0.2", "127.0.0.3", "127.0.0.1"});
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    std::vector<float> data(50'000, rank + 1.0f);
    Stream stream;
    const absl::Status status = comm.AllReduceSum(DeviceSpan<float>(data.data(), 50'000), stream);
    EXPECT_EQ(data, std::vector<float>(50'000, 6.0f));
    return status;
  });
  EXPECT_THAT(statuses, Each(absl::OkStatus()));
}

TEST(GlooConnectTest, RanksOnAnIPv6AddressFormAGroup) {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool usable = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  if (!usable) GTEST_SKIP() << "this machine has no IPv6 loopback address";
  EXPECT_THAT(TryToConnect({{.rank = 0, .size = 2, .listen_address = "::1"},
                            {.rank = 1, .size = 2, .listen_address = "::1"}}),
              Each(absl::OkStatus()));
}

TEST(GlooConnectTest, AnInterfaceTakesThePlaceOfAnAddress) {
  EXPECT_THAT(TryToConnect({{.rank = 0, .size = 2, .listen_address = "unused", .interface = "lo"},
                            {.rank = 1, .size = 2, .listen_address = "unused", .interface = "lo"}}),
              Each(absl::OkStatus()));
}

TEST(GlooConnectTest, AnAddressThatCannotBeUsedIsNamed) {
  const auto statuses = TryToConnect(
      {{.rank = 0, .size = 2, .listen_address = "192.0.2.7", .timeout = absl::Seconds(1)},
       {.rank = 1, .size = 2, .timeout = absl::Seconds(1)}});
  EXPECT_TRUE(absl::IsUnavailable(statuses[0])) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("192.0.2.7"));
  EXPECT_FALSE(statuses[1].ok());
}

TEST(GlooConnectTest, AnInterfaceThatIsNotThereIsNamedBesideThoseThatAre) {
  const auto statuses =
      TryToConnect({{.rank = 0, .size = 2, .interface = "eth77", .timeout = absl::Seconds(1)},
                    {.rank = 1, .size = 2, .timeout = absl::Seconds(1)}});
  EXPECT_TRUE(absl::IsUnavailable(statuses[0])) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("interface eth77"));
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("lo"));
}

TEST(GlooConnectTest, ANameThatDoesNotResolveIsNamed) {
  InProcessRendezvous store;
  const absl::Status status =
      CreateGlooCommunicator({.rank = 0, .size = 2, .listen_address = "no-such-host.invalid"},
                             store)
          .status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no-such-host.invalid"));
}

TEST(GlooConnectTest, RanksThatExpectGroupsOfDifferentSizesBothSaySo) {
  const auto statuses = TryToConnect({{.rank = 0, .size = 2}, {.rank = 1, .size = 3}});
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("2"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("3"));
  }
}

TEST(GlooConnectTest, ARankThatNeverComesIsADeadlineNamingIt) {
  const absl::Time start = absl::Now();
  const auto statuses = TryToConnect(
      {{.rank = 0, .size = 3, .timeout = absl::Milliseconds(500), .key_prefix = "g/epoch4"},
       {.rank = 1, .size = 3, .timeout = absl::Milliseconds(500), .key_prefix = "g/epoch4"}});
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("g/epoch4/size/2"));
  }
}

// The first exchange fails when a rank dies after it published its addresses.
TEST(GlooConnectTest, ARankThatDiesWhileConnectingIsAnErrorInTime) {
  class BreaksAtAddresses final : public RendezvousStore {
   public:
    explicit BreaksAtAddresses(RendezvousStore& store) : store_(store) {}
    absl::Status Put(const std::string& key, const std::string& value) override {
      return store_.Put(key, value);
    }
    absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) override {
      if (key.ends_with("/gloo/0")) return absl::UnavailableError("the service is gone");
      return store_.Wait(key, timeout);
    }

   private:
    RendezvousStore& store_;
  };
  InProcessRendezvous store;
  BreaksAtAddresses broken(store);
  std::vector<absl::Status> statuses(2);
  const absl::Time start = absl::Now();
  RunOnThreads(2, [&](int rank) {
    RendezvousStore& mine = rank == 0 ? static_cast<RendezvousStore&>(store) : broken;
    statuses[rank] =
        CreateGlooCommunicator({.rank = rank, .size = 2, .timeout = absl::Seconds(1)}, mine)
            .status();
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_FALSE(statuses[0].ok());
  EXPECT_EQ(statuses[1], absl::UnavailableError("the service is gone"));
}

TEST(GlooConnectTest, RefusesOptionsThatCannotWork) {
  InProcessRendezvous store;
  for (const GlooOptions& options :
       {GlooOptions{.rank = 2, .size = 2}, GlooOptions{.rank = -1, .size = 2},
        GlooOptions{.rank = 0, .size = 0}, GlooOptions{.timeout = absl::ZeroDuration()}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CreateGlooCommunicator(options, store).status()));
  }
}

TEST(GlooConnectTest, ManyGroupsOfOneProcessDoNotMeet) {
  InProcessRendezvous store;
  RunOnThreads(6, [&](int index) {
    const int group = index / 2;
    auto comm = CreateGlooCommunicator(
        {.rank = index % 2, .size = 2, .key_prefix = "group" + std::to_string(group)}, store);
    ASSERT_TRUE(comm.ok()) << comm.status();
    int64_t value = group;
    Stream stream;
    EXPECT_TRUE((*comm)->AllReduceSum(DeviceSpan<int64_t>(&value, 1), stream).ok());
    EXPECT_EQ(value, 2 * group);
  });
}

}  // namespace
}  // namespace heavywater
