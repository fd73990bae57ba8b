#include "cache_service/tier/redis_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// The mover, readers, one more. What is in flight is bounded by them: each has one
// exchange at a time.
constexpr int kMaxConnections = 4;
constexpr absl::Duration kFirstBackoff = absl::Milliseconds(100);
constexpr absl::Duration kMaxBackoff = absl::Seconds(10);

}  // namespace

RedisPool::RedisPool(RedisEndpoint endpoint, Clock& clock)
    : endpoint_(std::move(endpoint)), clock_(clock) {}

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisPool::Take() {
  {
    MutexLock lock(&mutex_);
    if (clock_.Now() < next_try_) {
      return absl::UnavailableError(absl::StrCat(last_error_, " (tried again later)"));
    }
    while (in_use_ == kMaxConnections) {
      if (given_back_.WaitWithTimeout(&mutex_, endpoint_.timeout) && in_use_ == kMaxConnections) {
        return absl::UnavailableError(absl::StrCat("redis at ", endpoint_.host, ":", endpoint_.port,
                                                   ": all ", kMaxConnections,
                                                   " connections are busy"));
      }
    }
    ++in_use_;
    if (!idle_.empty()) {
      std::unique_ptr<RedisConnection> connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  auto connected = RedisConnection::Connect(endpoint_);
  if (!connected.ok()) GiveBack(nullptr);
  return connected;
}

void RedisPool::GiveBack(std::unique_ptr<RedisConnection> connection) {
  MutexLock lock(&mutex_);
  --in_use_;
  if (connection != nullptr) idle_.push_back(std::move(connection));
  given_back_.Signal();
}

absl::Status RedisPool::Run(const std::function<absl::Status(RedisConnection&)>& work) {
  auto connection = Take();
  absl::Status status = connection.status();
  if (connection.ok()) {
    status = work(**connection);
    GiveBack(absl::IsUnavailable(status) ? nullptr : *std::move(connection));
  }
  MutexLock lock(&mutex_);
  if (!absl::IsUnavailable(status)) {
    backoff_ = absl::ZeroDuration();
    return status;
  }
  if (clock_.Now() < next_try_) return status;  // somebody else has noted it
  // The others broke with the server that this one has lost.
  idle_.clear();
  backoff_ = std::clamp(2 * backoff_, kFirstBackoff, kMaxBackoff);
  next_try_ = clock_.Now() + backoff_;
  last_error_ = std::string(status.message());
  return status;
}

}  // namespace heavywater
