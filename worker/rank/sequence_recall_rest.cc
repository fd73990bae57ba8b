// Recall's part in pages that rest: at the beginning of a step, so that nothing changes
// between a plan's exchange and its promotions, what has come back is taken, what was missed
// is asked for, and after plans the coldest pages are let go where host memory is short.
#include <algorithm>
#include <utility>

#include "worker/rank/sequence_recall.h"

namespace heavywater {
namespace {

// Where plans are rare, or none.
constexpr int64_t kRestSteps = 16;

}  // namespace

void SequenceRecall::UpdateRest() {
  TakeReturns();
  const std::vector<PageId> wanted = rest_.TakeWanted();
  if (!wanted.empty()) host_pages_.Ask(wanted);
  stats_.pages_asked += static_cast<int64_t>(wanted.size());
  if (!planned_ && ++steps_since_rest_ < kRestSteps) return;
  LetRest(std::exchange(planned_, false));
  steps_since_rest_ = 0;
}

void SequenceRecall::TakeReturns() {
  if (rest_.asked().empty()) return;
  for (const PageId& page : host_pages_.TakeGone()) {
    rest_.Lose(page);
    ++stats_.pages_lost;
  }
  for (const PageId& page : std::vector<PageId>(rest_.asked())) {
    const std::byte* const address = host_pages_.Page(page.layer, page.kv_head, page.page);
    if (address == nullptr) continue;
    layers_[page.layer].host_pages[page.kv_head * num_pages() + page.page] = address;
    rest_.Return(page);
    ++stats_.pages_returned;
  }
  stats_.pages_resting = rest_.num_resting();
}

void SequenceRecall::LetRest(bool planned) {
  const int64_t bytes = host_pages_.BytesToRest();
  if (bytes <= 0) return;
  if (!planned) AddHeat();
  rest_.BeginRound();
  LetColdestRest(bytes, /*spared_layer=*/-1);
}

void SequenceRecall::LetColdestRest(int64_t bytes, int spared_layer) {
  const int64_t page_bytes = sketch_.page_tokens * rank_.shape.row_bytes();
  const int64_t count = std::min((bytes + page_bytes - 1) / page_bytes, kMaxPagesToRest);
  // Full ones whose sketch is final: the open page is coded from its copy.
  std::vector<PageId> pages =
      rest_.Coldest(sketched_tokens_ / sketch_.page_tokens, count, spared_layer);
  std::erase_if(pages, [&](const PageId& page) { return !HasCopy(page); });
  if (pages.empty()) return;
  host_pages_.Rest(pages);
  for (const PageId& page : pages) {
    // What does not lie in the service's memory stays as it is.
    if (host_pages_.Page(page.layer, page.kv_head, page.page) != nullptr) continue;
    layers_[page.layer].host_pages[page.kv_head * num_pages() + page.page] = nullptr;
    rest_.Rest(page);
    ++stats_.pages_rested;
  }
  stats_.pages_resting = rest_.num_resting();
}

bool SequenceRecall::HasCopy(const PageId& page) const {
  return layers_[page.layer].host_pages[page.kv_head * num_pages() + page.page] != nullptr;
}

// Before a plan merges what picks have received since the last one.
void SequenceRecall::NoteHeat() {
  planned_ = true;
  if (rests_ && num_pages() > 0 && host_pages_.BytesToRest() > 0) AddHeat();
}

void SequenceRecall::AddHeat() {
  rest_.HalveHeat();
  for (int index = 0; index < rank_.shape.num_layers; ++index) {
    DemotedLedger& ledger = layers_[index].ledger;
    const std::span<const int64_t> gains = ledger.fresh_gains();
    for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
      for (int64_t page = 0; page < num_pages(); ++page) {
        const int64_t first = head * ledger.stride() + page * sketch_.page_tokens;
        int64_t mass = 0;
        for (int i = 0; i < sketch_.page_tokens; ++i) mass += gains[first + i];
        rest_.AddHeat(index, head, page, mass);
      }
    }
  }
}

bool SequenceRecall::IsAbsent(int layer, int set, int64_t page) const {
  const std::span<const std::byte* const> pages = layers_[layer].host_pages;
  // What is waited for counts as there.
  const auto absent = [&](int head) {
    return pages[head * num_pages() + page] == nullptr &&
           !(waits() && rest_.MayReturn(layer, head, page));
  };
  if (num_sets_ > 1) return absent(set);
  for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
    if (absent(head)) return true;
  }
  return false;
}

std::vector<uint8_t> SequenceRecall::AbsentPages(int layer, int head) const {
  std::vector<uint8_t> absent;
  if (!rests_ || stats_.pages_rested == 0) return absent;
  for (int64_t page = 0; page < num_pages(); ++page) {
    absent.push_back(IsAbsent(layer, num_sets_ > 1 ? head : 0, page) ? 1 : 0);
  }
  return absent;
}

void SequenceRecall::FillAbsent(const RecallRegion& region, std::span<int64_t> buffer) const {
  if (stats_.pages_rested == 0) return;
  for (int layer = 0; layer < region.num_layers; ++layer) {
    for (int64_t page = 0; page < region.num_pages; ++page) {
      if (IsAbsent(layer, 0, page)) buffer[region.Absent(layer, page)] += 1;
    }
  }
}

// The same on every rank: in scope `layer` what the ranks have told each other, else what the
// set's own rank knows.
bool SequenceRecall::MayPromote(int layer, int set, Position position, const RecallRegion& region,
                                std::span<const int64_t> buffer) const {
  if (!rests_) return true;
  const int64_t page = position / sketch_.page_tokens;
  if (num_sets_ > 1) return !IsAbsent(layer, set, page);
  return page >= region.num_pages || buffer[region.Absent(layer, page)] == 0;
}

}  // namespace heavywater
