// Pages that several sequences hold: who may take them over, and who gets a copy.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
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
  bool whole = true;
  for (int64_t row = 0; row < pages_of_row(); ++row) {
    const Key key = KeyOfRow(row, page);
    const auto found = pages_.find(key);
    if (found == pages_.end()) return false;
    PageEntry& entry = found->second;
    if (entry.tier != kHostTier || entry.stuck || (exact && entry.rounded)) return false;
    // One that is not full is sealed where nobody has written since it moved.
    if (entry.sealed) HW_RETURN_IF_ERROR(CheckSeal(key, entry));
    if (!IsCommitted(key, entry)) {
      whole = false;
    } else if (!entry.sealed) {
      Seal(key, entry);
    }
  }
  return whole;
}

int64_t SequencePages::WrittenPages() const {
  int64_t tokens = 0;
  for (int rank = 0; rank < spec_.num_ranks; ++rank) tokens = std::max(tokens, Watermark(rank));
  return spec_.geometry.PagesFor(tokens);
}

absl::Status SequencePages::CheckPage(int64_t page) {
  for (int64_t row = 0; row < pages_of_row(); ++row) {
    const Key key = KeyOfRow(row, page);
    const auto found = pages_.find(key);
    if (found == pages_.end() || found->second.tier != kHostTier) continue;
    if (found->second.sealed) HW_RETURN_IF_ERROR(CheckSeal(key, found->second));
  }
  return absl::OkStatus();
}

absl::Status SequencePages::CheckSeal(Key key, PageEntry& entry) {
  const uint32_t crc = Crc32c(PageBytes(entry));
  if (crc == entry.crc && !entry.stuck) return absl::OkStatus();
  entry.stuck = true;
  Touch(key);
  return absl::DataLossError(
      absl::StrCat(Describe(PlaceOf(key, entry).key), ": checksum is ", crc, ", want ", entry.crc));
}

int64_t SequencePages::PreparedPages(int64_t max, bool exact) const {
  for (int64_t page = 0; page < max; ++page) {
    for (int64_t row = 0; row < pages_of_row(); ++row) {
      const Key key = KeyOfRow(row, page);
      const auto found = pages_.find(key);
      if (found == pages_.end()) return page;
      const PageEntry& entry = found->second;
      const bool ready = entry.tier == kHostTier && entry.sealed && !entry.stuck;
      if (!ready || (exact && entry.rounded) || !IsCommitted(key, entry)) return page;
    }
  }
  return max;
}

// Of all heads; the first page tells whose each is.
int64_t SequencePages::CommittedTokens() const {
  int64_t tokens = spec_.max_tokens;
  for (int head = 0; head < spec_.geometry.num_kv_heads; ++head) {
    const auto found = pages_.find(KeyOf(0, head, 0));
    if (found == pages_.end()) return 0;
    tokens = std::min(tokens, WatermarkOf(found->second));
  }
  return tokens;
}

int64_t SequencePages::CopyableTokens(int64_t max) const {
  const int64_t tokens = std::min(max, CommittedTokens());
  const int64_t page_tokens = spec_.geometry.page_tokens;
  const int64_t whole = PreparedPages(tokens / page_tokens, /*exact=*/false);
  if (whole < tokens / page_tokens) return whole * page_tokens;
  for (int64_t row = 0; row < pages_of_row() && tokens % page_tokens != 0; ++row) {
    const auto found = pages_.find(KeyOfRow(row, whole));
    const bool there = found != pages_.end() && found->second.tier == kHostTier;
    if (!there || found->second.stuck) return whole * page_tokens;
  }
  return tokens;
}

absl::Status SequencePages::CheckCopyable(int64_t tokens) const {
  for (int64_t page = 0; page < spec_.geometry.PagesFor(tokens); ++page) {
    for (int64_t row = 0; row < pages_of_row(); ++row) {
      HW_RETURN_IF_ERROR(CheckReady(KeyOfRow(row, page), tokens));
    }
  }
  return absl::OkStatus();
}

absl::Status SequencePages::CheckReady(Key key, int64_t tokens) const {
  const auto found = pages_.find(key);
  const auto because = [&](const auto&... parts) {
    return absl::StrCat(Describe(PlaceOf(key, {}).key), parts...);
  };
  if (found == pages_.end()) return absl::DataLossError(because(" is not stored"));
  const PageEntry& entry = found->second;
  if (entry.stuck) return absl::DataLossError(because(" is damaged"));
  const int64_t committed = WatermarkOf(entry);
  if (committed < std::min(tokens, (PageOfKey(key) + 1) * spec_.geometry.page_tokens)) {
    return absl::DataLossError(because(": ", committed, " of ", tokens, " tokens are committed"));
  }
  if (entry.tier == kHostTier && (entry.sealed || !IsCommitted(key, entry))) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(because(" is not ready in host memory"));
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
    own.rounded = theirs.rounded;
    own.rows_written = static_cast<int32_t>(CommittedRows(page, tokens));
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
  const int64_t rows = CommittedRows(PageOfKey(key), watermark);
  const int64_t bytes = rows * spec_.geometry.row_bytes;
  std::byte* const to = slab_.At(offset);
  std::memcpy(to, slab_.At(entry.offset), static_cast<size_t>(bytes));
  std::memset(to + bytes, 0, static_cast<size_t>(spec_.geometry.page_bytes() - bytes));
  entry.offset = offset;
  entry.rows_written = static_cast<int32_t>(rows);
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
