#include "worker/server/response_queue.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace heavywater {

bool ResponseQueue::IsFull() const {
  return messages_.size() >= max_messages_ || bytes_ >= max_bytes_;
}

bool ResponseQueue::full() const {
  MutexLock lock(&mutex_);
  return IsFull();
}

absl::Time ResponseQueue::full_since() const {
  MutexLock lock(&mutex_);
  return full_since_;
}

void ResponseQueue::Push(v1::GenerateResponse response) {
  MutexLock lock(&mutex_);
  bytes_ += static_cast<int64_t>(response.ByteSizeLong());
  messages_.push_back(std::move(response));
  if (IsFull()) full_since_ = std::min(full_since_, absl::Now());
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
  // It reads: what it leaves after this counts anew.
  full_since_ = IsFull() ? absl::Now() : absl::InfiniteFuture();
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

void ResponseQueue::OnAbandon(std::function<void()> end_call) {
  MutexLock lock(&mutex_);
  end_call_ = std::move(end_call);
}

void ResponseQueue::Abandon() {
  MutexLock lock(&mutex_);
  if (end_call_) end_call_();
}

}  // namespace heavywater
