#include "cache_service/tier/redis_connection.h"

#include <sys/time.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(const std::string& host,
                                                                          int port,
                                                                          absl::Duration timeout) {
  const timeval limit = absl::ToTimeval(timeout);
  std::unique_ptr<RedisConnection> connection(new RedisConnection(
      redisConnectWithTimeout(host.c_str(), port, limit), absl::StrCat(host, ":", port)));
  if (connection->context_ == nullptr || connection->context_->err != 0 ||
      redisSetTimeout(connection->context_.get(), limit) != REDIS_OK) {
    return connection->Broken();
  }
  return connection;
}

absl::Status RedisConnection::Broken() const {
  return absl::UnavailableError(
      absl::StrCat("redis at ", address_, ": ",
                   context_ == nullptr ? "no memory" : static_cast<const char*>(context_->errstr)));
}

absl::Status RedisConnection::Send(const std::vector<std::string_view>& arguments) {
  std::vector<const char*> data;
  std::vector<size_t> bytes;
  for (const std::string_view argument : arguments) {
    data.push_back(argument.data());
    bytes.push_back(argument.size());
  }
  const int sent = redisAppendCommandArgv(context_.get(), static_cast<int>(data.size()),
                                          data.data(), bytes.data());
  return sent == REDIS_OK ? absl::OkStatus() : Broken();
}

absl::StatusOr<RedisConnection::Reply> RedisConnection::Receive() {
  void* reply = nullptr;
  if (redisGetReply(context_.get(), &reply) != REDIS_OK || reply == nullptr) return Broken();
  return Reply(static_cast<redisReply*>(reply));
}

}  // namespace heavywater
