// One connection to a Redis: commands in one go, answers in their order.
#pragma once

#include <hiredis/hiredis.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/tier/redis_tls.h"

namespace heavywater {

// Where it is, and who asks.
struct RedisEndpoint {
  std::string host = {};
  int port = 0;
  absl::Duration timeout = absl::Seconds(1);
  std::string username = {};       // empty: Redis's "default"
  std::string password_file = {};  // empty: none is sent
  RedisTlsOptions tls = {};
};

// INVALID_ARGUMENT naming a field or file that cannot be used.
absl::Status CheckRedisEndpoint(const RedisEndpoint& endpoint);

// Of an answer that is an error: the connection is good, the command was not taken.
// RESOURCE_EXHAUSTED: Redis has no memory left; else FAILED_PRECONDITION.
absl::Status FromReply(const redisReply& reply);

// Used by one thread at a time. After an error it is of no use any more.
class RedisConnection {
 public:
  // UNAVAILABLE naming the address: nobody is there, or refuses whoever asks; never with the
  // password, whose file is read now. Every exchange afterwards ends within the time-out of
  // the last byte that went either way.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisEndpoint& endpoint);
  // In plaintext, with no password.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const std::string& host, int port,
                                                                  absl::Duration timeout) {
    return Connect({.host = host, .port = port, .timeout = timeout});
  }

  struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
  };
  using Reply = std::unique_ptr<redisReply, FreeReply>;

  // Sent with the next Receive(). What the arguments point at is copied.
  absl::Status Send(const std::vector<std::string_view>& arguments);
  // The answer to the oldest command without one. An answer that is an error is OK here.
  absl::StatusOr<Reply> Receive();

 private:
  struct FreeContext {
    void operator()(redisContext* context) const { redisFree(context); }
  };
  RedisConnection(redisContext* context, std::string address)
      : context_(context), address_(std::move(address)) {}
  absl::Status Broken() const;
  absl::Status Broken(absl::string_view reason) const;
  absl::Status Authenticate(const RedisEndpoint& endpoint);
  absl::StatusOr<Reply> ReceiveOverTls();

  const std::unique_ptr<redisContext, FreeContext> context_;
  const std::string address_;
  std::unique_ptr<RedisTls> tls_;  // null: plaintext; goes before the socket
  std::string unsent_;             // over TLS
};

}  // namespace heavywater
