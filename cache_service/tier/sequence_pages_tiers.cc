// Pages of a sequence on their way between the slab and the tiers below.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/tier/sequence_pages.h"

namespace heavywater {

PageEntry* SequencePages::FindKey(const PageKey& key) {
  const auto found = pages_.find(KeyOf(key.layer, key.kv_head, key.page));
  return found == pages_.end() ? nullptr : &found->second;
}

int SequencePages::TierOf(const RowRange& rows) const {
  const int64_t page = spec_.geometry.PageOf(rows.first_position);
  const auto found = pages_.find(KeyOf(rows.layer, rows.kv_head, page));
  return found == pages_.end() ? kHostTier : found->second.tier;
}

std::vector<PagePlace> SequencePages::PagesBelow(int64_t tokens) const {
  std::vector<PagePlace> places;
  if (num_below_ == 0) return places;
  for (const auto& [key, entry] : pages_) {
    if (PageOfKey(key) * spec_.geometry.page_tokens >= tokens) continue;
    if (entry.tier != kHostTier) places.push_back(PlaceOf(key, entry));
  }
  return places;
}

PagePlace SequencePages::PlaceOf(Key key, const PageEntry& entry) const {
  return {.key = {.sequence = spec_.sequence,
                  .fingerprint = spec_.fingerprint,
                  .layer = static_cast<int>(key >> 10 & 1023),
                  .kv_head = static_cast<int>(key & 1023),
                  .page = PageOfKey(key)},
          .tier = entry.tier,
          .crc32c = entry.crc,
          .page_bytes = spec_.geometry.page_bytes(),
          .coding = entry.coding,
          .dtype = spec_.dtype,
          .geometry = spec_.geometry,
          .since = entry.since};
}

bool SequencePages::MayLeave(Key key, const PageEntry& entry, int from) const {
  if (entry.tier != from || entry.moving || entry.stuck) return false;
  return PageOfKey(key) * spec_.geometry.page_tokens < WatermarkOf(entry);
}

std::vector<PagePlace> SequencePages::BeginMoves(int from, int64_t max) {
  std::vector<PagePlace> places;
  if (from == kHostTier && !MayAllLeave()) return BeginRestingMoves(max);
  if (from == kHostTier && num_host_pages() == 0) return places;
  if (from != kHostTier && num_below_ == 0) return places;
  for (auto& [key, entry] : pages_) {
    if (static_cast<int64_t>(places.size()) == max) break;
    if (!MayLeave(key, entry, from)) continue;
    // Nobody writes any more, so that a page which is not full is final, too.
    if (!entry.sealed) Seal(key, entry);
    entry.moving = true;
    places.push_back(PlaceOf(key, entry));
  }
  return places;
}

std::vector<int64_t> SequencePages::TakeUnreadable() {
  std::vector<int64_t> offsets;
  if (!all_stopped() || num_host_pages() == 0) return offsets;
  for (int rank = 0; rank < spec_.num_ranks; ++rank) {
    const std::vector<int64_t> of_rank = TakeUncommitted(rank);
    offsets.insert(offsets.end(), of_rank.begin(), of_rank.end());
  }
  return offsets;
}

absl::Status SequencePages::CopyOut(const PagePlace& place, std::span<std::byte> bytes) {
  PageEntry* const entry = FindKey(place.key);
  if (entry == nullptr || entry->tier != kHostTier) {
    return absl::NotFoundError(absl::StrCat(Describe(place.key), " is not in the host tier"));
  }
  const uint32_t crc = CopyWithCrc32c(PageBytes(*entry).first(bytes.size()), bytes.data());
  if (crc == place.crc32c) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(Describe(place.key), ": checksum is ", crc, ", want ", place.crc32c));
}

Relocation SequencePages::Relocate(const PagePlace& place, int to, const StoredAs& as,
                                   std::optional<int64_t>* free_offset) {
  PageEntry* const entry = FindKey(place.key);
  // It was given up meanwhile, perhaps reserved anew: only its copy is nobody's.
  if (entry == nullptr || !entry->moving || entry->tier != place.tier) return Relocation::kKept;
  if (place.tier == kHostTier) {
    // A rank that has come back may have written to it since it was copied, or has asked
    // for it.
    const bool may_leave = entry->resting || MayAllLeave();
    if (!may_leave || !entry->sealed || entry->crc != place.crc32c) return Relocation::kKept;
    *free_offset = entry->offset;  // others that hold it keep it there
    MarkShared(*entry, false);
    ++num_below_;
  }
  entry->tier = static_cast<uint8_t>(to);
  entry->since = ResidenceClock();
  entry->coding = as.coding;
  entry->crc = as.crc32c;
  ListResting(KeyOf(place.key.layer, place.key.kv_head, place.key.page), entry);
  Touch(KeyOf(place.key.layer, place.key.kv_head, place.key.page));
  return Relocation::kMoved;
}

void SequencePages::Settle(const PageKey& key) {
  if (PageEntry* const entry = FindKey(key); entry != nullptr) entry->moving = false;
}

void SequencePages::MarkStuck(const PageKey& key) {
  if (PageEntry* const entry = FindKey(key); entry != nullptr) {
    entry->stuck = true;
    Touch(KeyOf(key.layer, key.kv_head, key.page));
  }
}

bool SequencePages::Promote(const PagePlace& place, int64_t offset,
                            std::span<const std::byte> bytes) {
  PageEntry* const entry = FindKey(place.key);
  if (entry == nullptr || entry->moving || entry->tier != place.tier) return false;
  std::memcpy(slab_.At(offset), bytes.data(), bytes.size());
  entry->offset = offset;
  entry->tier = kHostTier;
  entry->since = ResidenceClock();
  // What was coded is another page now, as whole as any.
  if (entry->coding != PageDtype::kOpaque) {
    entry->crc = Crc32c(bytes);
    entry->rounded = true;
  }
  entry->coding = PageDtype::kOpaque;
  entry->moving = true;
  ListResting(KeyOf(place.key.layer, place.key.kv_head, place.key.page), entry);
  Touch(KeyOf(place.key.layer, place.key.kv_head, place.key.page));
  --num_below_;
  return true;
}

}  // namespace heavywater
