#include "tests/cache_service/tier/redis_server.h"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

bool Answers(const RedisEndpoint& caller) {
  auto connection = RedisConnection::Connect(caller);
  return connection.ok() && (*connection)->Send({"PING"}).ok() && (*connection)->Receive().ok();
}

std::vector<std::string> Arguments(int port, bool tls, const std::string& folder,
                                   const std::vector<std::string>& more) {
  const std::string number = std::to_string(port);
  std::vector<std::string> arguments = {"redis-server",
                                        "--port",
                                        tls ? "0" : number,
                                        "--tls-port",
                                        tls ? number : "0",
                                        "--bind",
                                        "127.0.0.1",
                                        "--save",
                                        "",
                                        "--appendonly",
                                        "no",
                                        "--dir",
                                        folder};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace

RedisServer::RedisServer(int port, std::string folder) : port_(port), folder_(std::move(folder)) {}

std::unique_ptr<RedisServer> RedisServer::Start(std::string* reason, int port) {
  return Start(reason, {}, {}, port);
}

std::unique_ptr<RedisServer> RedisServer::Start(std::string* reason,
                                                const std::vector<std::string>& arguments,
                                                RedisEndpoint caller, int port) {
  if (port == 0) port = FreePort();
  caller.host = "127.0.0.1";
  caller.port = port;
  const std::string folder = (std::filesystem::temp_directory_path() /
                              absl::StrCat("heavywater-redis-", getpid(), "-", port))
                                 .string();
  std::filesystem::create_directories(folder);
  std::unique_ptr<RedisServer> server(new RedisServer(port, folder));
  const std::vector<std::string> all =
      Arguments(port, !caller.tls.ca_file.empty(), folder, arguments);
  if (!server->process_.Start(
          all, [&] { return Answers(caller); }, reason))
    return nullptr;
  return server;
}

RedisServer::~RedisServer() {
  Kill();
  std::filesystem::remove_all(folder_);
}

}  // namespace heavywater
