// heavywater-health HOST:PORT [SERVICE]: the answer of a server's health service on
// standard output; exit status 0 when it is SERVING, 1 when not, 2 on bad usage.
#include <cstdio>
#include <string>

#include "cache_service/runtime/health_client.h"

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: heavywater-health HOST:PORT [SERVICE]\n");
    return 2;
  }
  heavywater::HealthClient client(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  const std::string answer = client.Check(argc > 2 ? argv[2] : "");
  std::printf("%s\n", answer.c_str());
  return answer == "SERVING" ? 0 : 1;
}
