// What operators have done and what has happened, the last of it, for AdminService.Watch.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/admin.pb.h"

namespace heavywater {

// Thread safe.
class EventLog {
 public:
  static constexpr size_t kMaxEvents = 1024;
  static constexpr int kMaxEventsInMessage = 256;

  explicit EventLog(Clock& clock) : clock_(clock) {}

  void Add(const char* kind, std::string text) {
    MutexLock lock(&mutex_);
    v1::AdminEvent& event = events_.emplace_back();
    event.set_number(++last_);
    event.set_unix_ms(absl::ToUnixMillis(clock_.Now()));
    event.set_kind(kind);
    event.set_text(std::move(text));
    if (events_.size() > kMaxEvents) events_.pop_front();
  }

  int64_t last() const {
    MutexLock lock(&mutex_);
    return last_;
  }

  // Adds those after `after` to the message, as many as go into one; the number of the last
  // one that it has or knows to be missed.
  int64_t AddTo(int64_t after, v1::WatchResponse* response) const {
    MutexLock lock(&mutex_);
    const int64_t first = last_ - static_cast<int64_t>(events_.size()) + 1;
    if (after + 1 < first) {
      response->set_events_missed(first - after - 1);
      after = first - 1;
    }
    for (int64_t number = after + 1; number <= last_; ++number) {
      if (response->events_size() == kMaxEventsInMessage) break;
      *response->add_events() = events_[number - first];
      after = number;
    }
    return after;
  }

 private:
  Clock& clock_;
  mutable Mutex mutex_;
  std::deque<v1::AdminEvent> events_ ABSL_GUARDED_BY(mutex_);
  int64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace heavywater
