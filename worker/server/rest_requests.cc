#include "worker/server/rest_requests.h"

namespace heavywater {
namespace {

// The service answers heartbeats with what it saw at most so long before.
constexpr absl::Duration kAnswerAge = absl::Milliseconds(200);
constexpr size_t kMaxTold = 64;

}  // namespace

void RestRequests::Move(Page& page, State state) {
  to_tell_ += (state == State::kToTell) - (page.state == State::kToTell);
  telling_ += (state == State::kTelling) - (page.state == State::kTelling);
  to_ask_ += (state == State::kToAsk) - (page.state == State::kToAsk);
  page.state = state;
}

void RestRequests::Rest(const PageId& page, std::byte* address) {
  const auto [entry, added] = pages_.try_emplace(page);
  if (!added) return;
  entry->second.address = address;
  ++to_tell_;
}

std::byte* RestRequests::Ask(const PageId& page) {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return nullptr;
  Page& entry = found->second;
  std::byte* const address = entry.address;
  if (entry.state == State::kToTell && address != nullptr) {
    --to_tell_;
    pages_.erase(found);
    return address;
  }
  if (entry.state != State::kAsking) Move(entry, State::kToAsk);
  return nullptr;
}

std::vector<PageId> RestRequests::NextToTell(size_t max) {
  std::vector<PageId> pages;
  if (to_tell_ == 0) return pages;
  for (auto& [page, entry] : pages_) {
    if (pages.size() == max) break;
    if (entry.state != State::kToTell) continue;
    Move(entry, State::kTelling);
    entry.address = nullptr;
    pages.push_back(page);
  }
  return pages;
}

void RestRequests::TellEnded(const std::vector<PageId>& pages, bool known, absl::Time now) {
  for (const PageId& page : pages) {
    const auto found = pages_.find(page);
    // Asked for meanwhile: that goes out next.
    if (found == pages_.end() || found->second.state != State::kTelling) continue;
    Move(found->second, known ? State::kTold : State::kToTell);
  }
  if (!known) return;
  if (told_.size() == kMaxTold) told_.erase(told_.begin());
  told_.emplace_back(now, static_cast<int64_t>(pages.size()));
}

std::vector<PageId> RestRequests::NextToAsk(size_t max) {
  std::vector<PageId> pages;
  if (to_ask_ == 0) return pages;
  for (auto& [page, entry] : pages_) {
    if (pages.size() == max) break;
    if (entry.state != State::kToAsk) continue;
    Move(entry, State::kAsking);
    pages.push_back(page);
  }
  return pages;
}

void RestRequests::AskEnded(const PageId& page, Answer answer) {
  const auto found = pages_.find(page);
  if (found == pages_.end() || found->second.state != State::kAsking) return;
  if (answer == Answer::kLater) return Move(found->second, State::kToAsk);
  pages_.erase(found);
  if (answer == Answer::kGone) gone_.push_back(page);
}

int64_t RestRequests::PagesUnknownAt(absl::Time since) const {
  int64_t pages = to_tell_ + telling_;
  for (const auto& [told, count] : told_) {
    if (told + kAnswerAge >= since) pages += count;
  }
  return pages;
}

}  // namespace heavywater
