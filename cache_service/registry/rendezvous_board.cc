#include "cache_service/registry/rendezvous_board.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry_options.h"

namespace heavywater {

template <typename Matches, typename Result>
void RendezvousBoard::Finish(Matches matches, Result result, DeferredCalls& deferred) {
  std::vector<Waiter> left;
  for (Waiter& waiter : waiters_) {
    if (!matches(waiter)) {
      left.push_back(std::move(waiter));
      continue;
    }
    deferred.push_back([done = std::move(waiter.done),
                        value = absl::StatusOr<std::string>(result(waiter))] { done(value); });
  }
  waiters_ = std::move(left);
}

absl::Status RendezvousBoard::Put(const std::string& key, const std::string& value,
                                  DeferredCalls& deferred) {
  const auto found = values_.find(key);
  if (found == values_.end() && values_.size() >= kMaxKeys) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the group holds its limit of ", kMaxKeys, " keys"));
  }
  const size_t old_bytes = found == values_.end() ? 0 : key.size() + found->second.size();
  const size_t bytes = bytes_ - old_bytes + key.size() + value.size();
  if (bytes > kMaxBoardBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("keys and values of the group would have ",
                                                     bytes, " bytes, the limit is ",
                                                     kMaxBoardBytes));
  }
  bytes_ = bytes;
  values_[key] = value;
  ++revision_;
  Finish([&](const Waiter& waiter) { return waiter.key == key; },
         [&](const Waiter&) { return value; }, deferred);
  return absl::OkStatus();
}

void RendezvousBoard::Wait(Ticket ticket, const std::string& key, absl::Time deadline, Done done,
                           DeferredCalls& deferred) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    deferred.push_back([done = std::move(done), value = found->second] { done(value); });
    return;
  }
  if (waiters_.size() >= kMaxWaiters) {
    deferred.push_back([done = std::move(done)] {
      done(absl::ResourceExhaustedError(
          absl::StrCat("the group has its limit of ", kMaxWaiters, " waiting calls")));
    });
    return;
  }
  waiters_.push_back({ticket, key, deadline, std::move(done)});
}

void RendezvousBoard::Cancel(Ticket ticket, DeferredCalls& deferred) {
  Finish([&](const Waiter& waiter) { return waiter.ticket == ticket; },
         [](const Waiter&) { return absl::CancelledError("the caller gave up"); }, deferred);
}

void RendezvousBoard::Expire(absl::Time now, DeferredCalls& deferred) {
  Finish([&](const Waiter& waiter) { return waiter.deadline <= now; },
         [](const Waiter& waiter) {
           return absl::DeadlineExceededError(
               absl::StrCat("key \"", waiter.key, "\" was not put in time"));
         },
         deferred);
}

void RendezvousBoard::Clear(const absl::Status& status, DeferredCalls& deferred) {
  Finish([](const Waiter&) { return true; }, [&](const Waiter&) { return status; }, deferred);
  values_.clear();
  ++revision_;
  bytes_ = 0;
}

}  // namespace heavywater
