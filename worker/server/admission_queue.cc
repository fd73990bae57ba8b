#include "worker/server/admission_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"

namespace heavywater {

absl::Status AdmissionQueue::Room() const {
  if (!closed_.ok()) return closed_;
  if (waiting_.size() < max_queued_) return absl::OkStatus();
  return ExhaustedError(
      absl::StrCat(waiting_.size(), " requests wait already, max_queued is ", max_queued_),
      {.subject = "max_queued",
       .need = 1,
       .limit = static_cast<int64_t>(max_queued_),
       .retry_after = absl::Seconds(1)});
}

absl::Status AdmissionQueue::CheckRoom() const {
  MutexLock lock(&mutex_);
  return Room();
}

absl::Status AdmissionQueue::Submit(std::shared_ptr<ServedGeneration> generation) {
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(Room());
  waiting_.push_back(std::move(generation));
  woken_ = true;
  changed_.SignalAll();
  return absl::OkStatus();
}

void AdmissionQueue::Close(absl::Status reason) {
  MutexLock lock(&mutex_);
  if (closed_.ok()) closed_ = std::move(reason);
  changed_.SignalAll();
}

bool AdmissionQueue::closed() const {
  MutexLock lock(&mutex_);
  return !closed_.ok();
}

std::shared_ptr<ServedGeneration> AdmissionQueue::Front() const {
  MutexLock lock(&mutex_);
  return waiting_.empty() ? nullptr : waiting_.front();
}

void AdmissionQueue::PopFront() {
  MutexLock lock(&mutex_);
  waiting_.pop_front();
}

void AdmissionQueue::FinishCancelled() {
  MutexLock lock(&mutex_);
  std::erase_if(waiting_, [](const std::shared_ptr<ServedGeneration>& generation) {
    if (!generation->responses.cancelled()) return false;
    generation->responses.Finish(generation->CancelledStatus());
    return true;
  });
}

void AdmissionQueue::FinishAll(const absl::Status& status) {
  MutexLock lock(&mutex_);
  for (const auto& generation : waiting_) generation->responses.Finish(status);
  waiting_.clear();
}

size_t AdmissionQueue::size() const {
  MutexLock lock(&mutex_);
  return waiting_.size();
}

void AdmissionQueue::WaitForWork(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  if (!woken_) changed_.WaitWithTimeout(&mutex_, timeout);
  woken_ = false;
}

void AdmissionQueue::Wake() {
  MutexLock lock(&mutex_);
  woken_ = true;
  changed_.SignalAll();
}

}  // namespace heavywater
