#include "cache_service/security/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

namespace heavywater {

std::string HostOf(const std::string& address) {
  if (!address.empty() && address.front() == '[') {
    return address.substr(1, address.find(']') - 1);
  }
  const size_t colon = address.rfind(':');
  // More than one colon and no brackets: an IPv6 address without a port.
  if (colon == std::string::npos || address.find(':') != colon) return address;
  return address.substr(0, colon);
}

bool IsLoopback(const std::string& address) {
  const std::string host = HostOf(address);
  if (host == "localhost") return true;
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace heavywater
