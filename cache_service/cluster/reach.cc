#include "cache_service/cluster/reach.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "cache_service/security/address.h"

namespace heavywater {
namespace {

bool Connects(const addrinfo& address, absl::Duration limit) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  bool connected = connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  if (!connected && errno == EINPROGRESS) {
    pollfd waits = {.fd = fd, .events = POLLOUT, .revents = 0};
    int error = 0;
    socklen_t bytes = sizeof(error);
    connected = poll(&waits, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) == 1 &&
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0;
  }
  close(fd);
  return connected;
}

}  // namespace

bool Listens(const std::string& address, absl::Duration limit) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(HostOf(address).c_str(), address.substr(colon + 1).c_str(), &hints, &found) !=
      0) {
    return false;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (Connects(*one, limit)) return true;
  }
  return false;
}

}  // namespace heavywater
