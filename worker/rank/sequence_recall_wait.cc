// Recall's part in steps that wait for pages that rest.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "worker/rank/sequence_recall.h"

namespace heavywater {

bool SequenceRecall::MayWait(int layer) const {
  if (!waits() || !step_can_pick_ || rest_.num_resting() == 0) return false;
  const std::span<const uint8_t> resting = rest_.resting(layer);
  return View(layer) != nullptr &&
         std::any_of(resting.begin(), resting.end(), [](uint8_t rests) { return rests != 0; });
}

const RecallView* SequenceRecall::LookAhead(int layer) {
  ahead_ = views_[layer];
  missed_ahead_.assign(ahead_.resting.size(), 0);
  ahead_.missed = missed_ahead_;
  ahead_.num_missed = {};
  ahead_.gains = {};
  ahead_.num_picks = {};
  ahead_.picks = {};
  ahead_.missing = {};
  return &ahead_;
}

void SequenceRecall::Want(const PageId& page, std::vector<PageId>& asks) {
  if (!rest_.MayReturn(page.layer, page.kv_head, page.page)) return;
  awaited_.push_back(page);
  if (rest_.Ask(page)) asks.push_back(page);
}

void SequenceRecall::AskForMissed(int layer) {
  std::vector<PageId> asks;
  for (int64_t i = 0; i < static_cast<int64_t>(missed_ahead_.size()); ++i) {
    if (missed_ahead_[i] == 0) continue;
    Want({layer, static_cast<int>(i / num_pages()), i % num_pages()}, asks);
  }
  stats_.pages_asked += static_cast<int64_t>(asks.size());
  if (!asks.empty()) host_pages_.Ask(asks);
}

void SequenceRecall::AskForPromoted(int layer, int set, std::span<const Position> positions) {
  if (!rests_ || !options_.policy.recall.wait) return;
  std::vector<PageId> asks;
  for (const Position position : positions) {
    for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
      if (num_sets_ > 1 && head != set) continue;
      Want({layer, head, position / sketch_.page_tokens}, asks);
    }
  }
  stats_.pages_asked += static_cast<int64_t>(asks.size());
  if (!asks.empty()) host_pages_.Ask(asks);
  wait_left_ = rank_.max_recall_wait;
}

absl::Status SequenceRecall::AwaitAsked(int spared_layer) {
  while (true) {
    TakeReturns();
    std::erase_if(awaited_, [this](const PageId& page) {
      return !rest_.MayReturn(page.layer, page.kv_head, page.page);
    });
    if (awaited_.empty()) return absl::OkStatus();
    if (wait_left_ <= absl::ZeroDuration() || !host_pages_.readable()) break;
    const int64_t bytes = spared_layer < 0 ? 0 : host_pages_.BytesToRest();
    if (bytes > 0) LetColdestRest(bytes, spared_layer);
    const absl::Time begin = absl::Now();
    host_pages_.AwaitAsked(wait_left_);
    // At least a little: a tier that does not wait must not be asked for ever.
    wait_left_ -= std::max(absl::Now() - begin, absl::Milliseconds(1));
  }
  gave_up_ = true;
  const size_t late = awaited_.size();
  awaited_.clear();
  return absl::UnavailableError(
      absl::StrCat(late, " pages that rest below host memory have not come up within ",
                   absl::FormatDuration(rank_.max_recall_wait), " (recall_wait)"));
}

}  // namespace heavywater
