// What a generation has said and its client has not yet taken: between the
// thread of the step, which never waits, and the call's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/generation.pb.h"

namespace heavywater {

// Thread safe.
class ResponseQueue {
 public:
  ResponseQueue(size_t max_messages, int64_t max_bytes)
      : max_messages_(max_messages), max_bytes_(max_bytes) {}

  // The step's side. A sequence whose queue is full sits out steps until its
  // client has read; one message more is always taken.
  bool full() const;
  // Since when it is full and nothing was taken; InfiniteFuture() while it is not full.
  absl::Time full_since() const;
  void Push(v1::GenerateResponse response);
  // Nothing comes after it. The first status stays.
  void Finish(absl::Status status);
  bool cancelled() const;
  // Ends the call of a client that does not read: what OnAbandon() has set.
  void Abandon();

  // The call's side. The next message; nothing after the last one (see status())
  // or when none came within `timeout`.
  std::optional<v1::GenerateResponse> Pop(absl::Duration timeout);
  // All messages have been taken, and no more will come.
  bool done() const;
  absl::Status status() const;
  // The client is gone.
  void Cancel();
  // Called on the step's thread, by Abandon(); null: the call is over. Must not call back.
  void OnAbandon(std::function<void()> end_call);

 private:
  bool IsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_messages_;
  const int64_t max_bytes_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<v1::GenerateResponse> messages_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time full_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::function<void()> end_call_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
