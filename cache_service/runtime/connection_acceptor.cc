#include "cache_service/runtime/connection_acceptor.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <prometheus/counter.h>
#include <prometheus/registry.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/security/address.h"

namespace heavywater {
namespace {

// For a process without descriptors to get some back.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);
constexpr double kLinesPerSecond = 1;
constexpr absl::Duration kLookInterval = absl::Milliseconds(20);
// Of a process, beside its connections.
constexpr int64_t kOtherDescriptors = 256;

absl::Status CannotBind(const std::string& address) {
  return absl::UnavailableError(
      absl::StrCat("listen_address ", address, " cannot be bound: ", std::strerror(errno)));
}

absl::StatusOr<int> Bind(const addrinfo& where, const std::string& address) {
  const int fd = socket(where.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return CannotBind(address);
  const int on = 1;
  const int off = 0;
  // A server that is started again need not wait for connections of the last one.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (where.ai_family == AF_INET6) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));  // [::] is IPv4, too
  }
  if (bind(fd, where.ai_addr, where.ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const absl::Status failed = CannotBind(address);
  close(fd);
  return failed;
}

int PortOf(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return 0;
  return ntohs(storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

// Which socket the descriptor is; 0 when it is none.
uint64_t SocketOf(int fd) {
  struct stat file {};
  if (fstat(fd, &file) != 0 || !S_ISSOCK(file.st_mode)) return 0;
  return file.st_ino;
}

// The address without its port. An IPv4 address is the same on an IPv6 listener.
std::string PeerOf(const sockaddr_storage& storage) {
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  } else if (storage.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    const bool mapped = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    inet_ntop(mapped ? AF_INET : AF_INET6,
              mapped ? static_cast<const void*>(&v6.sin6_addr.s6_addr[12]) : &v6.sin6_addr, text,
              sizeof(text));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(
    const std::string& address, const ConnectionLimits& limits, prometheus::Registry& metrics) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = address.substr(address.rfind(':') + 1);
  const int error = getaddrinfo(HostOf(address).c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen_address is \"", address, "\": ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  HW_ASSIGN_OR_RETURN(const int listener, Bind(*found, address));
  prometheus::Counter& refused =
      prometheus::BuildCounter()
          .Name("heavywater_connections_refused_total")
          .Help("Connections that were closed at once, because as many as may be were open")
          .Register(metrics)
          .Add({});
  return std::unique_ptr<ConnectionAcceptor>(
      new ConnectionAcceptor(listener, PortOf(listener), limits, refused));
}

ConnectionAcceptor::ConnectionAcceptor(int listener, int port, const ConnectionLimits& limits,
                                       prometheus::Counter& refused)
    : listener_(listener),
      port_(port),
      limits_(limits),
      refused_(refused),
      log_limit_(kLinesPerSecond),
      wake_(eventfd(0, EFD_CLOEXEC)) {}

ConnectionAcceptor::~ConnectionAcceptor() {
  Stop();
  close(wake_);
}

void ConnectionAcceptor::Run(Handle handle) {
  handle_ = std::move(handle);
  thread_ = std::thread([this] { Loop(); });
}

void ConnectionAcceptor::Stop() {
  if (stopped_.exchange(true)) return;
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  close(listener_);
}

void ConnectionAcceptor::Loop() {
  pollfd events[] = {{.fd = wake_, .events = POLLIN, .revents = 0},
                     {.fd = listener_, .events = POLLIN, .revents = 0}};
  while (!stopped_) {
    if (poll(events, 2, -1) < 0) {
      if (errno != EINTR) absl::SleepFor(kAcceptPause);
      continue;
    }
    if (events[0].revents != 0) return;
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    const int connection =
        accept4(listener_, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection >= 0) {
      Take(connection, PeerOf(peer));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      if (log_limit_.Allow(absl::Now())) {
        LogWarn("no connection can be accepted for now", {{"error", std::strerror(errno)}});
      }
      poll(events, 1, static_cast<int>(absl::ToInt64Milliseconds(kAcceptPause)));
    }
  }
}

void ConnectionAcceptor::Take(int connection, const std::string& peer) {
  if (!HasRoom(peer)) {
    close(connection);
    refused_.Increment();
    if (const std::optional<int64_t> suppressed = log_limit_.Allow(absl::Now())) {
      LogWarn("connection refused: as many as may be are open",
              {{"limit", FullLimit(peer)}, {"peer", peer}, {"not_logged_before", *suppressed}});
    }
    return;
  }
  const int on = 1;
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Forget(connection);  // the descriptor's number may be one that was closed
  open_[connection] = {SocketOf(connection), peer};
  ++of_peer_[peer];
  handle_(listener_, connection);
}

const char* ConnectionAcceptor::FullLimit(const std::string& peer) const {
  if (static_cast<int64_t>(open_.size()) >= limits_.all) return "max_connections";
  const auto count = of_peer_.find(peer);
  const bool peer_is_full =
      limits_.of_one_peer > 0 && count != of_peer_.end() && count->second >= limits_.of_one_peer;
  return peer_is_full ? "max_connections_per_peer" : nullptr;
}

bool ConnectionAcceptor::HasRoom(const std::string& peer) {
  if (FullLimit(peer) == nullptr) return true;
  // Not for each of a flood.
  if (absl::Now() < looked_ + kLookInterval) return false;
  looked_ = absl::Now();
  ForgetClosed();
  return FullLimit(peer) == nullptr;
}

void ConnectionAcceptor::ForgetClosed() {
  std::vector<int> closed;
  for (const auto& [connection, open] : open_) {
    if (SocketOf(connection) != open.socket) closed.push_back(connection);
  }
  for (const int connection : closed) Forget(connection);
}

void ConnectionAcceptor::Forget(int connection) {
  const auto open = open_.find(connection);
  if (open == open_.end()) return;
  const auto count = of_peer_.find(open->second.peer);
  if (--count->second == 0) of_peer_.erase(count);
  open_.erase(open);
}

int64_t RoomForConnections(int64_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  if (limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
  }
  const auto descriptors = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
  return std::max<int64_t>(1, std::min(wanted, descriptors - kOtherDescriptors));
}

}  // namespace heavywater
