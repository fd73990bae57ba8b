// heavywater-health HOST:PORT [SERVICE]: the answer of a server's health service on
// standard output; exit status 0 when it is SERVING, 1 when not, 2 on bad usage. With TLS
// the environment says HEAVYWATER_TLS_CA_FILE, HEAVYWATER_TLS_CERT_FILE,
// HEAVYWATER_TLS_KEY_FILE and HEAVYWATER_TLS_SERVER_NAME, as for the other clients.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cache_service/runtime/health_client.h"
#include "cache_service/security/channels.h"

namespace {

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr char kUsage[] = "usage: heavywater-health HOST:PORT [SERVICE]\n";
  const bool asks = argc == 2 && std::string(argv[1]) == "--help";
  if (argc < 2 || argc > 3 || asks) {
    std::fputs(kUsage, asks ? stdout : stderr);
    return asks ? 0 : 2;
  }
  const auto channels =
      heavywater::Channels::Create({.ca_file = Environment("HEAVYWATER_TLS_CA_FILE"),
                                    .cert_file = Environment("HEAVYWATER_TLS_CERT_FILE"),
                                    .key_file = Environment("HEAVYWATER_TLS_KEY_FILE"),
                                    .server_name = Environment("HEAVYWATER_TLS_SERVER_NAME")});
  if (!channels.ok()) {
    std::fprintf(stderr, "heavywater-health: %s\n", channels.status().ToString().c_str());
    return 2;
  }
  heavywater::HealthClient client((*channels)->MakeWithoutToken(argv[1], grpc::ChannelArguments()));
  const std::string answer = client.Check(argc > 2 ? argv[2] : "");
  std::printf("%s\n", answer.c_str());
  return answer == "SERVING" ? 0 : 1;
}
