#include "worker/comm/gloo/peer_sockets.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/check.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

sockaddr_storage Address(const char* ip, uint16_t port) {
  sockaddr_storage storage{};
  auto& address = reinterpret_cast<sockaddr_in&>(storage);
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  HW_CHECK(inet_pton(AF_INET, ip, &address.sin_addr) == 1);
  return storage;
}

uint16_t PortOf(int fd) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  HW_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.sin_port);
}

int BoundSocket(const char* ip, uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  HW_CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
  const sockaddr_storage address = Address(ip, port);
  HW_CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(sockaddr_in)) == 0);
  return fd;
}

// Both ends of a connection: `near` from 127.0.0.2:`port` (0 for any) to `far`,
// which accepted on 127.0.0.1.
struct Connection {
  explicit Connection(uint16_t port = 0) {
    const int listener = BoundSocket("127.0.0.1", 0);
    HW_CHECK(listen(listener, 1) == 0);
    accepted_on = Address("127.0.0.1", PortOf(listener));
    near = BoundSocket("127.0.0.2", port);
    HW_CHECK(connect(near, reinterpret_cast<sockaddr*>(&accepted_on), sizeof(sockaddr_in)) == 0);
    far = accept(listener, nullptr, nullptr);
    HW_CHECK(far >= 0);
    close(listener);
  }
  ~Connection() {
    close(near);
    close(far);
  }
  // As the connecting rank sees the pair: its own address is the higher one.
  PairAddresses FromNear() const { return {Address("127.0.0.2", 1), accepted_on}; }
  PairAddresses FromFar() const { return {accepted_on, Address("127.0.0.2", 1)}; }
  void Say() const { HW_CHECK(write(far, "x", 1) == 1); }

  sockaddr_storage accepted_on{};
  int near = -1;
  int far = -1;
};

class PeerSocketsTest : public ::testing::Test {
 protected:
  // This rank is 2; ranks 0 and 1 are at the far ends.
  PeerSocketsTest() {
    HW_CHECK(sockets_.Add(zero_.FromNear(), absl::Seconds(30)).ok());
    HW_CHECK(sockets_.Add(one_.FromNear(), absl::Seconds(30)).ok());
    sockets_.AddNone();
  }
  absl::StatusOr<int> Wait(const std::vector<bool>& awaited, absl::Duration timeout) {
    return sockets_.WaitReadable(awaited, absl::Now() + timeout);
  }

  Connection zero_;
  Connection one_;
  PeerSockets sockets_;
};

TEST_F(PeerSocketsTest, FindsAConnectionAmongThoseThatShareItsLocalPort) {
  const Connection first;
  const Connection second(PortOf(first.near));
  PeerSockets sockets;
  ASSERT_TRUE(sockets.Add(first.FromNear(), absl::Seconds(1)).ok());
  ASSERT_TRUE(sockets.Add(second.FromNear(), absl::Seconds(1)).ok());
  second.Say();
  EXPECT_EQ(sockets.WaitReadable({true, true}, absl::Now() + absl::Seconds(30)).value(), 1);
}

TEST_F(PeerSocketsTest, FindsTheAcceptingEndToo) {
  const Connection connection;
  PeerSockets sockets;
  ASSERT_TRUE(sockets.Add(connection.FromFar(), absl::Seconds(1)).ok());
  HW_CHECK(write(connection.near, "x", 1) == 1);
  EXPECT_EQ(sockets.WaitReadable({true}, absl::Now() + absl::Seconds(30)).value(), 0);
}

// A rank that dies just after it has connected leaves none: its peers join again.
TEST_F(PeerSocketsTest, SaysWhichPairHasNoSocketAnyMore) {
  const absl::Status status =
      sockets_.Add({Address("127.0.0.2", 1), Address("127.0.0.1", 1)}, absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no socket of the pair with rank 3"));
}

TEST_F(PeerSocketsTest, ReturnsThePeerThatSpoke) {
  one_.Say();
  EXPECT_EQ(Wait({true, true, false}, absl::Seconds(30)).value(), 1);
}

TEST_F(PeerSocketsTest, NamesThePeersThatSaidNothing) {
  zero_.Say();
  const absl::Status status = Wait({false, true, false}, absl::Milliseconds(20)).status();
  EXPECT_EQ(status, absl::DeadlineExceededError("no message from rank 1"));
}

TEST_F(PeerSocketsTest, APeersCloseEndsTheWaitForAnother) {
  shutdown(zero_.far, SHUT_RDWR);
  const absl::Time start = absl::Now();
  const absl::Status status = Wait({false, true, false}, absl::Minutes(5)).status();
  EXPECT_EQ(status, absl::UnavailableError("rank 0 closed its connection"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

TEST_F(PeerSocketsTest, AMessageThatIsOnItsWayIsStillHeardAfterAnothersClose) {
  shutdown(zero_.far, SHUT_RDWR);
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(50));
    one_.Say();
  });
  EXPECT_EQ(Wait({false, true, false}, absl::Minutes(5)).value(), 1);
  late.join();
}

TEST_F(PeerSocketsTest, KnowsWhetherAllPeersAreThere) {
  EXPECT_TRUE(sockets_.CheckOpen().ok());
  shutdown(one_.far, SHUT_RDWR);
  EXPECT_EQ(sockets_.CheckOpen(), absl::UnavailableError("rank 1 closed its connection"));
}

TEST_F(PeerSocketsTest, ShutdownEndsAWaitHereAndTheFarEndsReads) {
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(50));
    sockets_.Shutdown();
  });
  EXPECT_TRUE(Wait({true, true, false}, absl::Minutes(5)).ok());  // there is an end to read
  char byte;
  EXPECT_EQ(read(zero_.far, &byte, 1), 0);
  EXPECT_EQ(read(one_.far, &byte, 1), 0);
  stopper.join();
}

}  // namespace
}  // namespace heavywater
