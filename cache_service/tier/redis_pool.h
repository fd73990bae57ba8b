// A few connections to one Redis, made when they are needed, and rest after failures.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/redis_connection.h"

namespace heavywater {

// Thread safe. After a failure nobody tries again before a time that doubles with
// every further failure: callers are told UNAVAILABLE at once meanwhile.
class RedisPool {
 public:
  // The clock must outlive it.
  RedisPool(RedisEndpoint endpoint, Clock& clock);

  // Runs `work` with a connection of its own. UNAVAILABLE, also from `work`: the
  // connection is given up.
  absl::Status Run(const std::function<absl::Status(RedisConnection&)>& work);

 private:
  absl::StatusOr<std::unique_ptr<RedisConnection>> Take();
  void GiveBack(std::unique_ptr<RedisConnection> connection);

  const RedisEndpoint endpoint_;
  Clock& clock_;
  Mutex mutex_;
  CondVar given_back_;
  std::vector<std::unique_ptr<RedisConnection>> idle_ ABSL_GUARDED_BY(mutex_);
  int in_use_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration backoff_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::string last_error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
