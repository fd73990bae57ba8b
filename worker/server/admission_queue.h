// Requests that wait for room: first come, first served.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "worker/server/served_generation.h"

namespace heavywater {

// Thread safe.
class AdmissionQueue {
 public:
  explicit AdmissionQueue(size_t max_queued) : max_queued_(max_queued) {}

  // RESOURCE_EXHAUSTED when max_queued wait already, the reason once closed.
  absl::Status CheckRoom() const;
  absl::Status Submit(std::shared_ptr<ServedGeneration> generation);
  // Refuses what comes from now on.
  void Close(absl::Status reason);
  bool closed() const;

  // The longest waiting, or null.
  std::shared_ptr<ServedGeneration> Front() const;
  void PopFront();
  // Ends those whose clients have gone (or all of them).
  void FinishCancelled();
  void FinishAll(const absl::Status& status);

  size_t size() const;
  // Until the next Submit() or Wake() since the last call, or `timeout`.
  void WaitForWork(absl::Duration timeout);
  void Wake();

 private:
  absl::Status Room() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_queued_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<ServedGeneration>> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace heavywater
