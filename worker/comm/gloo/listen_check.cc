#include "worker/comm/gloo/listen_check.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace heavywater {
namespace {

bool CanListenOn(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool bound = bind(fd, address.ai_addr, address.ai_addrlen) == 0;
  close(fd);
  return bound;
}

// Of interfaces that are up and have an IP address.
std::set<std::string> UsableInterfaces() {
  std::set<std::string> names;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return names;
  const absl::Cleanup free_all = [all] { freeifaddrs(all); };
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) names.insert(one->ifa_name);
  }
  return names;
}

absl::Status CheckInterface(const std::string& interface) {
  const std::set<std::string> usable = UsableInterfaces();
  if (usable.contains(interface)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "cannot listen on interface ", interface, ", want one of this machine that is up and has an ",
      "address: ", usable.empty() ? "there is none" : absl::StrJoin(usable, ", ")));
}

}  // namespace

absl::Status CheckListens(const std::string& listen_address, const std::string& interface) {
  if (!interface.empty()) return CheckInterface(interface);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(listen_address.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot resolve listen_address ", listen_address, ": ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (CanListenOn(*one)) return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("cannot listen on listen_address ", listen_address,
                   ", want an address of this machine, whose interfaces are ",
                   absl::StrJoin(UsableInterfaces(), ", ")));
}

}  // namespace heavywater
