// Of one sequence's pages on one rank: which rest at the cache service, and what it is still to
// be told or asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cache_service/tier/host_tier.h"

namespace heavywater {

// Not thread safe: the step adds, the thread that calls the service takes and answers.
class RestRequests {
 public:
  // The page, which lay at `address`, rests; the service is to be told.
  void Rest(const PageId& page, std::byte* address);
  // The page is wanted back. Its address where the service was not told yet: it is there
  // again. Null: it is asked for; or it does not rest.
  std::byte* Ask(const PageId& page);
  int64_t num_resting() const { return static_cast<int64_t>(pages_.size()); }

  // What to tell next. TellEnded() for all of it when the call has ended: `known`, it has
  // been taken or refused; else it is told again, since it may have been taken.
  std::vector<PageId> NextToTell(size_t max);
  void TellEnded(const std::vector<PageId>& pages, bool known, absl::Time now);

  // What to ask for next, and how that ended for each page.
  std::vector<PageId> NextToAsk(size_t max);
  enum class Answer { kThere, kLater, kGone };
  void AskEnded(const PageId& page, Answer answer);
  bool has_work() const { return to_tell_ > 0 || to_ask_ > 0; }
  // Each that was lost, once.
  std::vector<PageId> TakeGone() { return std::exchange(gone_, {}); }

  // Pages that came to rest of which who looked at the service's memory at `since` cannot
  // have known.
  int64_t PagesUnknownAt(absl::Time since) const;

 private:
  enum class State { kToTell, kTelling, kTold, kToAsk, kAsking };
  struct Page {
    State state = State::kToTell;
    std::byte* address = nullptr;  // null: the service may have been told
  };
  using Pages = std::map<PageId, Page>;
  void Move(Page& page, State state);

  Pages pages_;
  int64_t to_tell_ = 0;  // of them: kToTell
  int64_t telling_ = 0;  // kTelling
  int64_t to_ask_ = 0;   // kToAsk
  std::vector<PageId> gone_;
  // What was told last: when, and how many pages.
  std::vector<std::pair<absl::Time, int64_t>> told_;
};

}  // namespace heavywater
