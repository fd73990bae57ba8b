#include "worker/server/peer_watch.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/runtime/server_runtime.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Milliseconds(300);

// A peer whose answers a test decides; what the watch said of it.
class Peer {
 public:
  PeerWatch::Ping ping() {
    return [this](absl::Duration timeout) -> absl::Status {
      ++asked_;
      if (status_ == absl::StatusCode::kDeadlineExceeded) absl::SleepFor(timeout);
      return absl::Status(status_, "");
    };
  }
  PeerWatch::OnSilent on_silent() {
    return [this](absl::Status reason) {
      reason_ = std::move(reason);
      ++silent_;
    };
  }
  void Answer(absl::StatusCode status) { status_ = status; }
  void WaitUntilAsked(int times) {
    const int before = asked_;
    while (asked_ < before + times) absl::SleepFor(absl::Milliseconds(5));
  }
  bool WaitUntilSilent(absl::Duration limit) {
    const absl::Time deadline = absl::Now() + limit;
    while (silent_ == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    return silent_ > 0;
  }
  int silent() const { return silent_; }
  const absl::Status& reason() const { return reason_; }

 private:
  std::atomic<absl::StatusCode> status_{absl::StatusCode::kOk};
  std::atomic<int> asked_{0};
  std::atomic<int> silent_{0};
  absl::Status reason_;
};

TEST(PeerWatchTest, APeerThatStopsAnsweringIsNamedOnce) {
  Peer peer;
  PeerWatch watch("rank 1", kTimeout, peer.ping(), peer.on_silent());
  peer.WaitUntilAsked(2);
  EXPECT_EQ(peer.silent(), 0);
  peer.Answer(absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(peer.WaitUntilSilent(absl::Seconds(20)));
  EXPECT_EQ(peer.reason().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(peer.reason().message()), HasSubstr("rank 1 has not answered for 300ms"));
  absl::SleepFor(2 * kTimeout);
  EXPECT_EQ(peer.silent(), 1);
}

TEST(PeerWatchTest, OneUnansweredQuestionIsNoSilence) {
  Peer peer;
  std::atomic<int> asked{0};
  PeerWatch watch(
      "rank 1", kTimeout,
      [&](absl::Duration) -> absl::Status {
        return ++asked % 3 == 0 ? absl::OkStatus() : absl::DeadlineExceededError("");
      },
      peer.on_silent());
  while (asked < 12) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(peer.silent(), 0);
}

TEST(PeerWatchTest, AnErrorIsAnAnswer) {
  Peer peer;
  PeerWatch watch("rank 1", kTimeout, peer.ping(), peer.on_silent());
  peer.WaitUntilAsked(2);
  peer.Answer(absl::StatusCode::kUnavailable);
  peer.WaitUntilAsked(6);
  EXPECT_EQ(peer.silent(), 0);
}

TEST(PeerWatchTest, APeerThatNeverAnsweredIsNotJudged) {
  Peer peer;
  peer.Answer(absl::StatusCode::kDeadlineExceeded);
  PeerWatch watch("rank 1", kTimeout, peer.ping(), peer.on_silent());
  peer.WaitUntilAsked(6);
  EXPECT_EQ(peer.silent(), 0);
}

TEST(HealthPingTest, AServerAnswersAndOneThatIsGoneIsNotSilent) {
  ServerRuntimeOptions options;
  options.listen_address = "127.0.0.1:0";
  auto server = ServerRuntime::Start(options, {}, std::make_shared<prometheus::Registry>());
  ASSERT_TRUE(server.ok()) << server.status();
  const PeerWatch::Ping ping = MakeHealthPing((*server)->address());
  EXPECT_EQ(ping(absl::Seconds(20)), absl::OkStatus());
  server->reset();
  EXPECT_EQ(ping(absl::Seconds(20)).code(), absl::StatusCode::kUnavailable);
}

TEST(HealthPingTest, WhoeverAcceptsButNeverAnswersIsSilent) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  HW_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, 8) == 0);
  HW_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const PeerWatch::Ping ping = MakeHealthPing(absl::StrCat("127.0.0.1:", ntohs(address.sin_port)));
  EXPECT_EQ(ping(absl::Milliseconds(300)).code(), absl::StatusCode::kDeadlineExceeded);
  close(fd);
}

}  // namespace
}  // namespace heavywater
