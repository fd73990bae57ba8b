// Pages of a sequence that goes on, which its ranks do not read for now.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/sequence_pages.h"

namespace heavywater {
namespace {

std::string Name(const PageId& page) {
  return absl::StrCat("page ", page.page, ", layer ", page.layer, ", kv_head ", page.kv_head);
}

}  // namespace

absl::StatusOr<PageEntry*> SequencePages::FindOwn(int rank, const PageId& page) {
  const PageGeometry& geometry = spec_.geometry;
  const bool possible = page.layer >= 0 && page.layer < geometry.num_layers && page.kv_head >= 0 &&
                        page.kv_head < geometry.num_kv_heads && page.page >= 0 &&
                        page.page < geometry.PagesFor(spec_.max_tokens);
  const auto found =
      possible ? pages_.find(KeyOf(page.layer, page.kv_head, page.page)) : pages_.end();
  if (found == pages_.end()) return absl::NotFoundError(absl::StrCat(Name(page), " is not there"));
  const bool nobodys = found->second.rank == kNoRank;  // came from another sequence
  if (found->second.rank == rank || nobodys) return &found->second;
  return absl::FailedPreconditionError(
      absl::StrCat(Name(page), " belongs to rank ", found->second.rank, ", not to rank ", rank));
}

absl::Status SequencePages::Rest(int rank, std::span<const PageId> pages) {
  const int64_t watermark = Watermark(rank);
  for (const PageId& page : pages) {
    const absl::StatusOr<PageEntry*> entry = FindOwn(rank, page);
    if (!entry.ok()) return entry.status();
    const int64_t end = (page.page + 1) * spec_.geometry.page_tokens;
    if (end <= watermark) continue;
    return absl::FailedPreconditionError(absl::StrCat(Name(page), " ends at ", end, ", but ",
                                                      watermark,
                                                      " tokens are committed: it cannot rest"));
  }
  for (const PageId& page : pages) {
    const Key key = KeyOf(page.layer, page.kv_head, page.page);
    PageEntry& entry = pages_.at(key);
    if (entry.tier == kHostTier && !entry.sealed) Seal(key, entry);
    SetResting(key, entry, true);
  }
  return absl::OkStatus();
}

// From now on it stays, also where it is on its way down (Relocate() finds that it does not
// rest) or comes up only later.
absl::StatusOr<SequencePages::Asked> SequencePages::Ask(int rank, const PageId& page) {
  const absl::StatusOr<PageEntry*> found = FindOwn(rank, page);
  if (!found.ok()) return found.status();
  PageEntry& entry = **found;
  const Key key = KeyOf(page.layer, page.kv_head, page.page);
  SetResting(key, entry, false);
  if (entry.tier != kHostTier) return Asked{.offset = 0, .below = PlaceOf(key, entry)};
  if (entry.stuck) {
    return absl::DataLossError(absl::StrCat(Name(page), ": its bytes have changed in the slab"));
  }
  return Asked{.offset = entry.offset, .below = std::nullopt};
}

void SequencePages::StopResting() {
  if (num_resting_ == 0) return;
  for (auto& [key, entry] : pages_) SetResting(key, entry, false);
}

void SequencePages::SetResting(Key key, PageEntry& entry, bool resting) {
  if (entry.resting == resting) return;
  entry.resting = resting;
  num_resting_ += resting ? 1 : -1;
  ListResting(key, &entry);
  Touch(key);
}

void SequencePages::ListResting(Key key, const PageEntry* entry) {
  if (entry != nullptr && entry->resting && entry->tier == kHostTier) {
    resting_in_slab_.insert(key);
  } else {
    resting_in_slab_.erase(key);
  }
}

std::vector<PagePlace> SequencePages::BeginRestingMoves(int64_t max) {
  std::vector<PagePlace> places;
  for (const Key key : resting_in_slab_) {
    if (static_cast<int64_t>(places.size()) == max) break;
    PageEntry& entry = pages_.at(key);
    // Sealed when it came to rest; a page that is not full never does.
    if (!entry.sealed || !MayLeave(key, entry, kHostTier)) continue;
    entry.moving = true;
    places.push_back(PlaceOf(key, entry));
  }
  return places;
}

int SequencePages::LowestTierOf(std::span<const PageId> pages) const {
  int lowest = kHostTier;
  if (num_below_ == 0) return lowest;
  for (const PageId& page : pages) {
    if (page.layer < 0 || page.kv_head < 0 || page.layer > 1023 || page.kv_head > 1023) continue;
    const auto found = pages_.find(KeyOf(page.layer, page.kv_head, page.page));
    if (found != pages_.end()) lowest = std::max<int>(lowest, found->second.tier);
  }
  return lowest;
}

std::vector<PagePlace> SequencePages::PagesBelow(const PageRange& range) const {
  std::vector<PagePlace> places;
  if (num_below_ == 0) return places;
  for (int layer = 0; layer < spec_.geometry.num_layers; ++layer) {
    for (int head = range.heads.first; head < range.heads.first + range.heads.count; ++head) {
      for (int64_t page = range.first_page; page < range.first_page + range.num_pages; ++page) {
        const auto found = pages_.find(KeyOf(layer, head, page));
        if (found == pages_.end() || found->second.tier == kHostTier) continue;
        places.push_back(PlaceOf(found->first, found->second));
      }
    }
  }
  return places;
}

}  // namespace heavywater
