#include "worker/comm/gloo/peer_sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// How long a wait goes on after some other peer has closed. Ranks that disagree
// on a call close as soon as they know; the message that tells the rest may
// still be on its way from a slower rank.
constexpr absl::Duration kCloseGrace = absl::Milliseconds(500);

// Ranks in step answer within microseconds, sooner than a sleeping core wakes.
// The wait yields at every turn, because there may be more ranks than cores.
constexpr absl::Duration kSpin = absl::Microseconds(50);

// A peer's machine that vanished without a word is noticed after about 5 s.
constexpr int kKeepAliveIdleSeconds = 2;
constexpr int kKeepAliveIntervalSeconds = 1;
constexpr int kKeepAliveProbes = 3;

bool SameAddress(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    const auto& a4 = reinterpret_cast<const sockaddr_in&>(a);
    const auto& b4 = reinterpret_cast<const sockaddr_in&>(b);
    return a4.sin_port == b4.sin_port && a4.sin_addr.s_addr == b4.sin_addr.s_addr;
  }
  if (a.ss_family != AF_INET6) return false;
  const auto& a6 = reinterpret_cast<const sockaddr_in6&>(a);
  const auto& b6 = reinterpret_cast<const sockaddr_in6&>(b);
  return a6.sin6_port == b6.sin6_port &&
         std::memcmp(&a6.sin6_addr, &b6.sin6_addr, sizeof(a6.sin6_addr)) == 0;
}

// Gloo's rule: of two addresses the higher one's rank connects. Addresses compare
// bytewise, ports as the integers that their network bytes make here.
bool Connects(const sockaddr_storage& mine, const sockaddr_storage& theirs) {
  if (mine.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(mine);
    const auto& b = reinterpret_cast<const sockaddr_in&>(theirs);
    const int order = std::memcmp(&a.sin_addr, &b.sin_addr, sizeof(a.sin_addr));
    return order != 0 ? order > 0 : a.sin_port > b.sin_port;
  }
  const auto& a = reinterpret_cast<const sockaddr_in6&>(mine);
  const auto& b = reinterpret_cast<const sockaddr_in6&>(theirs);
  const int order = std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof(a.sin6_addr));
  return order != 0 ? order > 0 : a.sin6_port > b.sin6_port;
}

// A connection is known by the address that accepted it. The connecting end's
// says nothing: the kernel gives one port to connections with different far ends.
bool IsSocketOf(int fd, const PairAddresses& pair) {
  sockaddr_storage local{};
  sockaddr_storage remote{};
  socklen_t length = sizeof(local);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0) return false;
  length = sizeof(remote);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &length) != 0) return false;
  return Connects(pair.mine, pair.theirs) ? SameAddress(remote, pair.theirs)
                                          : SameAddress(local, pair.mine);
}

std::vector<int> OpenDescriptors() {
  std::vector<int> fds;
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return fds;
  while (const dirent* entry = readdir(directory)) {
    int fd = -1;
    if (absl::SimpleAtoi(entry->d_name, &fd)) fds.push_back(fd);
  }
  closedir(directory);
  return fds;
}

bool SetInt(int fd, int level, int option, int value) {
  return setsockopt(fd, level, option, &value, sizeof(value)) == 0;
}

absl::Status Configure(int fd, absl::Duration timeout) {
  const timeval time = absl::ToTimeval(timeout);
  const bool ok = fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
                  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) == 0 &&
                  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) == 0 &&
                  SetInt(fd, SOL_SOCKET, SO_KEEPALIVE, 1) &&
                  SetInt(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleSeconds) &&
                  SetInt(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalSeconds) &&
                  SetInt(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  if (ok) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("could not configure a connection between ranks: ", std::strerror(errno)));
}

std::string NameRanks(const std::vector<bool>& ranks) {
  std::string names;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank]) absl::StrAppend(&names, names.empty() ? "rank " : ", rank ", rank);
  }
  return names;
}

absl::Status ClosedBy(int peer) {
  return absl::UnavailableError(absl::StrCat("rank ", peer, " closed its connection"));
}

int PollTimeoutMs(absl::Duration left) {
  return static_cast<int>(std::clamp<int64_t>(
      absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))), 0, 1 << 30));
}

int PollWithSpin(std::vector<pollfd>& polled, absl::Duration left) {
  const absl::Time spin_until = absl::Now() + kSpin;
  do {
    const int ready = poll(polled.data(), polled.size(), 0);
    if (ready != 0) return ready;
    sched_yield();
  } while (absl::Now() < spin_until);
  return poll(polled.data(), polled.size(), PollTimeoutMs(left));
}

}  // namespace

PeerSockets::~PeerSockets() {
  for (const int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

absl::Status PeerSockets::Add(const PairAddresses& pair, absl::Duration timeout) {
  std::vector<int> found;
  for (const int fd : OpenDescriptors()) {
    if (IsSocketOf(fd, pair)) found.push_back(fd);
  }
  if (found.empty()) {
    return absl::UnavailableError(absl::StrCat("found no socket of the pair with rank ",
                                               fds_.size(), ": it closed while the group formed"));
  }
  if (found.size() > 1) {
    return absl::InternalError(absl::StrCat("found ", found.size(),
                                            " sockets of the pair with rank ", fds_.size(),
                                            " among the process's descriptors, want 1"));
  }
  HW_RETURN_IF_ERROR(Configure(found[0], timeout));
  const int duplicate = fcntl(found[0], F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return absl::ErrnoToStatus(errno, "could not duplicate a socket");
  fds_.push_back(duplicate);
  return absl::OkStatus();
}

absl::StatusOr<int> PeerSockets::WaitReadable(const std::vector<bool>& awaited,
                                              absl::Time deadline) const {
  std::vector<pollfd> polled(fds_.size());
  for (size_t peer = 0; peer < fds_.size(); ++peer) {
    polled[peer] = {fds_[peer], static_cast<short>(awaited[peer] ? POLLIN : POLLRDHUP), 0};
  }
  int closed = -1;
  for (;;) {
    const absl::Duration left = deadline - absl::Now();
    const int ready = PollWithSpin(polled, left);
    if (ready < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
    for (size_t peer = 0; peer < polled.size(); ++peer) {
      if (polled[peer].revents == 0) continue;
      if (awaited[peer]) return static_cast<int>(peer);
      polled[peer].fd = -1;
      if (closed < 0) deadline = std::min(deadline, absl::Now() + kCloseGrace);
      closed = static_cast<int>(peer);
    }
    if (ready != 0 || left > absl::ZeroDuration()) continue;
    if (closed >= 0) return ClosedBy(closed);
    return absl::DeadlineExceededError(absl::StrCat("no message from ", NameRanks(awaited)));
  }
}

absl::Status PeerSockets::CheckOpen() const {
  std::vector<pollfd> polled(fds_.size());
  for (size_t peer = 0; peer < fds_.size(); ++peer) polled[peer] = {fds_[peer], POLLRDHUP, 0};
  if (poll(polled.data(), polled.size(), 0) <= 0) return absl::OkStatus();
  size_t peer = 0;
  while (peer < polled.size() && polled[peer].revents == 0) ++peer;
  return ClosedBy(static_cast<int>(peer));
}

void PeerSockets::Shutdown() const {
  for (const int fd : fds_) {
    if (fd >= 0) shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace heavywater
