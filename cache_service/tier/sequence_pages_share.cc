// Pages that several sequences hold: who may take them over, and who gets a copy.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/tier/sequence_pages.h"

namespace heavywater {
namespace {

absl::Status Differs(const char* field, int64_t got, int64_t want) {
  return absl::FailedPreconditionError(
      absl::StrCat(field, " is ", got, ", the sequence with the pages has ", want));
}

}  // namespace

absl::Status SequencePages::CheckSource(const SequenceSpec& spec) const {
  const PageGeometry& own = spec_.geometry;
  if (spec.fingerprint != spec_.fingerprint) {
    return Differs("fingerprint", static_cast<int64_t>(spec.fingerprint),
                   static_cast<int64_t>(spec_.fingerprint));
  }
  if (spec.geometry.num_layers != own.num_layers) {
    return Differs("num_layers", spec.geometry.num_layers, own.num_layers);
  }
  if (spec.geometry.num_kv_heads != own.num_kv_heads) {
    return Differs("num_kv_heads", spec.geometry.num_kv_heads, own.num_kv_heads);
  }
  if (spec.geometry.page_tokens != own.page_tokens) {
    return Differs("page_tokens", spec.geometry.page_tokens, own.page_tokens);
  }
  if (spec.geometry.row_bytes == own.row_bytes) return absl::OkStatus();
  return Differs("row_bytes", spec.geometry.row_bytes, own.row_bytes);
}

absl::StatusOr<bool> SequencePages::PreparePage(int64_t page, bool exact) {
  for (int64_t row = 0; row < pages_of_row(); ++row) {
    const int heads = spec_.geometry.num_kv_heads;
    const Key key = KeyOf(static_cast<int>(row / heads), static_cast<int>(row % heads), page);
    const auto found = pages_.find(key);
    if (found == pages_.end()) return false;
    PageEntry& entry = found->second;
    const bool fits = entry.tier == kHostTier && !entry.stuck && !(exact && entry.rounded);
    if (!fits || !IsCommitted(key, entry)) return false;
    if (!entry.sealed) {
      Seal(key, entry);
      continue;
    }
    const uint32_t crc = Crc32c(PageBytes(entry));
    if (crc == entry.crc) continue;
    entry.stuck = true;
    Touch(key);
    return absl::DataLossError(absl::StrCat(Describe(PlaceOf(key, entry).key), ": checksum is ",
                                            crc, ", want ", entry.crc));
  }
  return true;
}

int64_t SequencePages::PreparedPages(int64_t max, bool exact) const {
  const int heads = spec_.geometry.num_kv_heads;
  for (int64_t page = 0; page < max; ++page) {
    for (int64_t row = 0; row < pages_of_row(); ++row) {
      const Key key = KeyOf(static_cast<int>(row / heads), static_cast<int>(row % heads), page);
      const auto found = pages_.find(key);
      if (found == pages_.end()) return page;
      const PageEntry& entry = found->second;
      const bool ready = entry.tier == kHostTier && entry.sealed && !entry.stuck;
      if (!ready || (exact && entry.rounded) || !IsCommitted(key, entry)) return page;
    }
  }
  return max;
}

int64_t SequencePages::CopyableTokens(int64_t tokens) const {
  const int64_t page_tokens = spec_.geometry.page_tokens;
  const int64_t whole = PreparedPages(tokens / page_tokens, /*exact=*/false);
  if (whole < tokens / page_tokens || tokens % page_tokens == 0) return whole * page_tokens;
  const int heads = spec_.geometry.num_kv_heads;
  int64_t last = tokens;
  for (int64_t row = 0; row < pages_of_row(); ++row) {
    const auto found =
        pages_.find(KeyOf(static_cast<int>(row / heads), static_cast<int>(row % heads), whole));
    const bool there = found != pages_.end() && found->second.tier == kHostTier;
    if (!there || found->second.stuck) return whole * page_tokens;
    last = std::min(last, WatermarkOf(found->second));
  }
  return std::max(last, whole * page_tokens);
}

void SequencePages::TakeFrom(SequencePages& source, int64_t tokens,
                             std::span<const int64_t> offsets) {
  const int64_t page_tokens = spec_.geometry.page_tokens;
  const int64_t whole = tokens / page_tokens;
  size_t used = 0;
  for (auto& [key, theirs] : source.pages_) {
    const int64_t page = PageOfKey(key);
    if (page * page_tokens >= tokens) continue;
    HW_CHECK(theirs.tier == kHostTier);
    PageEntry& own = pages_[key];
    own.offset = theirs.offset;
    own.rank = kNoRank;
    own.direct = true;
    own.rounded = theirs.rounded;
    own.rows_written = static_cast<int32_t>(std::min(page_tokens, tokens - page * page_tokens));
    if (page < whole) {
      HW_CHECK(theirs.sealed);
      own.crc = theirs.crc;
      own.sealed = true;
      MarkShared(own, true);
      source.MarkShared(theirs, true);
      source.Touch(key);
    } else {
      CopyOnWrite(key, offsets[used++], tokens);
    }
    Touch(key);
  }
  HW_CHECK(used == offsets.size());
  for (int rank = 0; rank < spec_.num_ranks; ++rank) {
    WatermarkCell(rank).store(tokens, std::memory_order_release);
  }
  NoteChange();
}

void SequencePages::StopAll() {
  for (int rank = 0; rank < spec_.num_ranks; ++rank) stopped_.insert(rank);
  NoteChange();
}

// What lies behind the watermark is another text's.
void SequencePages::CopyOnWrite(Key key, int64_t offset, int64_t watermark) {
  PageEntry& entry = pages_.at(key);
  const int64_t begin = PageOfKey(key) * spec_.geometry.page_tokens;
  const int64_t rows = std::clamp<int64_t>(watermark - begin, 0, spec_.geometry.page_tokens);
  const int64_t bytes = rows * spec_.geometry.row_bytes;
  std::byte* const to = slab_.At(offset);
  std::memcpy(to, slab_.At(entry.offset), static_cast<size_t>(bytes));
  std::memset(to + bytes, 0, static_cast<size_t>(spec_.geometry.page_bytes() - bytes));
  entry.offset = offset;
  entry.sealed = false;
  entry.summed = false;
  entry.contested = false;
  MarkShared(entry, false);
}

std::vector<std::pair<int64_t, uint32_t>> SequencePages::SharedPages() const {
  std::vector<std::pair<int64_t, uint32_t>> pages;
  if (num_shared_ == 0) return pages;  // most have none, and a table is long
  for (const auto& [key, entry] : pages_) {
    if (entry.shared) pages.emplace_back(entry.offset, entry.crc);
  }
  return pages;
}

}  // namespace heavywater
