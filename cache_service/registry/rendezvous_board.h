// The key-value store of one group in one epoch, where its ranks leave addresses
// for each other. Waiting is a callback, so that it holds no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace heavywater {

// Names a call that waits, so that it can be cancelled.
using Ticket = uint64_t;

// Callbacks that must run once the caller has left its mutex.
using DeferredCalls = std::vector<std::function<void()>>;

// Not thread safe. Callbacks never run inside; they are added to `deferred`.
class RendezvousBoard {
 public:
  using Done = std::function<void(absl::StatusOr<std::string>)>;

  // A key written again takes the new value. RESOURCE_EXHAUSTED naming the limit.
  absl::Status Put(const std::string& key, const std::string& value, DeferredCalls& deferred);

  const std::map<std::string, std::string>& values() const { return values_; }
  int64_t revision() const { return revision_; }  // rises with every change of them

  void Wait(Ticket ticket, const std::string& key, absl::Time deadline, Done done,
            DeferredCalls& deferred);
  void Cancel(Ticket ticket, DeferredCalls& deferred);
  // DEADLINE_EXCEEDED naming the key for those whose time is over.
  void Expire(absl::Time now, DeferredCalls& deferred);
  // Ends all waits and forgets all keys.
  void Clear(const absl::Status& status, DeferredCalls& deferred);

 private:
  struct Waiter {
    Ticket ticket;
    std::string key;
    absl::Time deadline;
    Done done;
  };

  // Ends the waits that `matches` names.
  template <typename Matches, typename Result>
  void Finish(Matches matches, Result result, DeferredCalls& deferred);

  std::map<std::string, std::string> values_;
  size_t bytes_ = 0;  // of keys and values
  int64_t revision_ = 0;
  std::vector<Waiter> waiters_;
};

}  // namespace heavywater
