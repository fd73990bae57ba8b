#include "worker/server/response_queue.h"

#include <utility>

#include "absl/time/clock.h"

namespace heavywater {

bool ResponseQueue::full() const {
  MutexLock lock(&mutex_);
  return messages_.size() >= max_messages_ || bytes_ >= max_bytes_;
}

void ResponseQueue::Push(v1::GenerateResponse response) {
  MutexLock lock(&mutex_);
  bytes_ += static_cast<int64_t>(response.ByteSizeLong());
  messages_.push_back(std::move(response));
  changed_.SignalAll();
}

void ResponseQueue::Finish(absl::Status status) {
  MutexLock lock(&mutex_);
  if (!status_.has_value()) status_ = std::move(status);
  changed_.SignalAll();
}

bool ResponseQueue::cancelled() const {
  MutexLock lock(&mutex_);
  return cancelled_;
}

std::optional<v1::GenerateResponse> ResponseQueue::Pop(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(&mutex_);
  while (messages_.empty() && !status_.has_value() && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  if (messages_.empty()) return std::nullopt;
  v1::GenerateResponse response = std::move(messages_.front());
  messages_.pop_front();
  bytes_ -= static_cast<int64_t>(response.ByteSizeLong());
  return response;
}

bool ResponseQueue::done() const {
  MutexLock lock(&mutex_);
  return messages_.empty() && status_.has_value();
}

absl::Status ResponseQueue::status() const {
  MutexLock lock(&mutex_);
  return status_.value_or(absl::OkStatus());
}

void ResponseQueue::Cancel() {
  MutexLock lock(&mutex_);
  cancelled_ = true;
}

}  // namespace heavywater
