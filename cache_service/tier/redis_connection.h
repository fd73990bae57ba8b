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

namespace heavywater {

// Used by one thread at a time. After an error it is of no use any more.
class RedisConnection {
 public:
  // UNAVAILABLE naming the address. Every exchange afterwards ends within `timeout` of
  // the last byte that went either way.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const std::string& host, int port,
                                                                  absl::Duration timeout);

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

  const std::unique_ptr<redisContext, FreeContext> context_;
  const std::string address_;
};

}  // namespace heavywater
