// Recall's part in steps that wait for pages that rest.
#include <algorithm>

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
}

bool SequenceRecall::HasCopies(int layer, int set, Position position) const {
  const int64_t page = position / sketch_.page_tokens;
  for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
    if (num_sets_ > 1 && head != set) continue;
    if (!HasCopy({layer, head, page})) return false;
  }
  return true;
}

void SequenceRecall::AwaitAsked(int spared_layer, absl::Duration& left) {
  while (!awaited_.empty()) {
    TakeReturns();
    std::erase_if(awaited_, [this](const PageId& page) {
      return !rest_.MayReturn(page.layer, page.kv_head, page.page);
    });
    if (awaited_.empty()) return;
    if (left <= absl::ZeroDuration() || !host_pages_.readable()) break;
    const int64_t bytes = spared_layer < 0 ? 0 : host_pages_.BytesToRest();
    if (bytes > 0) LetColdestRest(bytes, spared_layer);
    const absl::Time begin = absl::Now();
    host_pages_.AwaitAsked(left);
    // At least a little: a tier that does not wait must not be asked for ever.
    left -= std::max(absl::Now() - begin, absl::Milliseconds(1));
  }
  if (awaited_.empty()) return;
  ++stats_.waits_given_up;
  late_.insert(late_.end(), awaited_.begin(), awaited_.end());
  awaited_.clear();
}

void SequenceRecall::ForgetLate() {
  std::erase_if(late_, [this](const PageId& page) {
    return !rest_.MayReturn(page.layer, page.kv_head, page.page);
  });
}

}  // namespace heavywater
