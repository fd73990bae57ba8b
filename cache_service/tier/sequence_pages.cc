#include "cache_service/tier/sequence_pages.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/copy_bytes.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/slab_view.h"

namespace heavywater {
namespace {

constexpr size_t kManyBytes = size_t{32} << 10;

// Whatever came may be far outside: no arithmetic on it before this.
absl::Status OutOfRange(const char* field, int64_t first, int64_t count, int64_t limit) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", count, " from ", first, " are not within [0, ", limit, ")"));
}

bool Within(int64_t first, int64_t count, int64_t limit) {
  return first >= 0 && count >= 1 && first <= limit && count <= limit - first;
}

// Calls visit(layer, kv_head, page) in the order of Reservation::offsets.
template <typename Visit>
void ForEachPage(const PageRange& range, int num_layers, Visit visit) {
  for (int layer = 0; layer < num_layers; ++layer) {
    for (int head = range.heads.first; head < range.heads.first + range.heads.count; ++head) {
      for (int64_t page = range.first_page; page < range.first_page + range.num_pages; ++page) {
        visit(layer, head, page);
      }
    }
  }
}

std::string Describe(const RowRange& rows, int64_t page) {
  return absl::StrCat("page ", page, " of sequence ", rows.sequence, ", layer ", rows.layer,
                      ", kv_head ", rows.kv_head);
}

}  // namespace

SequencePages::SequencePages(const SequenceSpec& spec, int64_t watermarks_offset, Slab& slab)
    : spec_(spec), watermarks_offset_(watermarks_offset), slab_(slab) {
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    WatermarkCell(rank).store(0, std::memory_order_release);
  }
}

SequencePages::Key SequencePages::KeyOf(int layer, int kv_head, int64_t page) const {
  // PageGeometry::Validate() bounds layers and heads by 1024.
  return static_cast<uint64_t>(page) << 20 | static_cast<uint64_t>(layer) << 10 |
         static_cast<uint64_t>(kv_head);
}

absl::Status SequencePages::CheckRange(const PageRange& range) const {
  if (range.rank < 0 || range.rank >= spec_.num_ranks) {
    return OutOfRange("ranks", range.rank, 1, spec_.num_ranks);
  }
  if (!Within(range.heads.first, range.heads.count, spec_.geometry.num_kv_heads)) {
    return OutOfRange("kv_heads", range.heads.first, range.heads.count,
                      spec_.geometry.num_kv_heads);
  }
  const int64_t limit = spec_.geometry.PagesFor(spec_.max_tokens);
  if (!Within(range.first_page, range.num_pages, limit)) {
    return OutOfRange("pages", range.first_page, range.num_pages, limit);
  }
  const int64_t heads = int64_t{spec_.geometry.num_layers} * range.heads.count;
  if (range.num_pages > kMaxPagesPerReservation / heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_pages is ", range.num_pages, " of ", heads, " layers and heads, want ",
                     kMaxPagesPerReservation / heads, " or fewer in one call"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SequencePages::Missing> SequencePages::CountMissing(const PageRange& range) const {
  const int64_t prompt_end = spec_.geometry.PagesFor(spec_.prompt_tokens);
  const int64_t watermark = Watermark(range.rank);
  Missing missing = {.watermark = watermark};
  absl::Status status;
  ForEachPage(range, spec_.geometry.num_layers, [&](int layer, int head, int64_t page) {
    const auto found = pages_.find(KeyOf(layer, head, page));
    if (found == pages_.end()) {
      ++missing.pages;
      if (page < prompt_end) ++missing.prompt_pages;
      if (IsSkipped(range.rank, page) && status.ok()) {
        status = absl::FailedPreconditionError(
            absl::StrCat("page ", page, " was given up by rank ", range.rank));
      }
      if (page * spec_.geometry.page_tokens < watermark && status.ok()) {
        status = absl::FailedPreconditionError(
            absl::StrCat("page ", page, " begins below the rank's watermark ", watermark,
                         ": it would be readable before it is written"));
      }
    } else if (found->second.tier != kHostTier && status.ok()) {
      status = absl::FailedPreconditionError(
          absl::StrCat("page ", page, ", layer ", layer, ", kv_head ", head,
                       " has moved below host memory: it cannot be written any more"));
    } else if (found->second.rank != range.rank && found->second.rank != kNoRank && status.ok()) {
      status = absl::FailedPreconditionError(
          absl::StrCat("page ", page, ", layer ", layer, ", kv_head ", head, " belongs to rank ",
                       found->second.rank, ", not to rank ", range.rank));
    } else if (WantsCopy(found->first, found->second, watermark)) {
      ++missing.pages;
    }
  });
  HW_RETURN_IF_ERROR(status);
  return missing;
}

Reservation SequencePages::Fill(const PageRange& range, int64_t watermark,
                                std::span<const int64_t> offsets, bool direct,
                                std::vector<int64_t>* left) {
  Reservation reservation;
  reservation.watermark_offset = CellOffset(range.rank);
  size_t used = 0;
  ForEachPage(range, spec_.geometry.num_layers, [&](int layer, int head, int64_t page) {
    const auto [entry, added] = pages_.try_emplace(KeyOf(layer, head, page));
    Touch(entry->first);
    if (added) {
      entry->second.offset = offsets[used++];
      // Whatever its writer leaves out reads as zeros, never as what lay there.
      std::memset(slab_.At(entry->second.offset), 0, spec_.geometry.page_bytes());
    } else if (WantsCopy(entry->first, entry->second, watermark)) {
      LetGo(entry->second, left);
      CopyOnWrite(entry->first, offsets[used++], watermark);
    }
    entry->second.rank = static_cast<int16_t>(range.rank);
    // One that was sealed before it was full, since all ranks had stopped, is open again.
    if ((page + 1) * spec_.geometry.page_tokens > watermark) {
      entry->second.sealed = false;
    }
    SetResting(entry->first, entry->second, false);
    // Of rows that were written in place only the committed ones are known.
    if (entry->second.direct && !direct) {
      const auto committed = static_cast<int32_t>(CommittedRows(page, watermark));
      entry->second.rows_written = std::max(entry->second.rows_written, committed);
    }
    if (direct) entry->second.summed = false;
    entry->second.direct = direct;
    reservation.offsets.push_back(entry->second.offset);
  });
  HW_CHECK(used == offsets.size());
  const auto [heads, added] = heads_.try_emplace(range.rank, range.heads);
  if (!added) {
    HeadRange& known = heads->second;
    const int end = std::max(known.first + known.count, range.heads.first + range.heads.count);
    known.first = std::min(known.first, range.heads.first);
    known.count = end - known.first;
  }
  if (direct && !streamers_.contains(range.rank)) writers_.insert(range.rank);
  stopped_.erase(range.rank);
  awaited_.erase(range.rank);
  NoteChange();
  return reservation;
}

absl::Status SequencePages::CheckRows(const RowRange& rows, size_t bytes) const {
  const PageGeometry& geometry = spec_.geometry;
  if (!Within(rows.layer, 1, geometry.num_layers)) {
    return OutOfRange("layers", rows.layer, 1, geometry.num_layers);
  }
  if (!Within(rows.kv_head, 1, geometry.num_kv_heads)) {
    return OutOfRange("kv_heads", rows.kv_head, 1, geometry.num_kv_heads);
  }
  if (!Within(rows.first_position, rows.num_positions, spec_.max_tokens)) {
    return OutOfRange("positions", rows.first_position, rows.num_positions, spec_.max_tokens);
  }
  if (geometry.RowOf(rows.first_position) + rows.num_positions > geometry.page_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "positions [", rows.first_position, ", ", rows.first_position + rows.num_positions,
        ") do not lie within one page of ", geometry.page_tokens));
  }
  if (static_cast<int64_t>(bytes) != rows.num_positions * geometry.row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rows have ", bytes, " bytes, want ", rows.num_positions, " times ", geometry.row_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<PageEntry*> SequencePages::Find(const RowRange& rows) {
  const int64_t page = spec_.geometry.PageOf(rows.first_position);
  const auto found = pages_.find(KeyOf(rows.layer, rows.kv_head, page));
  if (found == pages_.end()) {
    const int64_t begin = page * spec_.geometry.page_tokens;
    return absl::NotFoundError(absl::StrCat(Describe(rows, page), ": positions [", begin, ", ",
                                            begin + spec_.geometry.page_tokens,
                                            ") are not in the host tier"));
  }
  return &found->second;
}

absl::Status SequencePages::Write(int rank, const RowRange& rows,
                                  std::span<const std::byte> bytes) {
  HW_RETURN_IF_ERROR(CheckRows(rows, bytes.size()));
  HW_ASSIGN_OR_RETURN(PageEntry* const entry, Find(rows));
  const int64_t page = spec_.geometry.PageOf(rows.first_position);
  if (entry->rank != rank) {
    return absl::FailedPreconditionError(absl::StrCat(Describe(rows, page), " belongs to rank ",
                                                      entry->rank, ", not to rank ", rank));
  }
  if (entry->contested) {
    return absl::FailedPreconditionError(
        absl::StrCat(Describe(rows, page),
                     " may still be written by a process before: want it "
                     "reserved anew"));
  }
  if (entry->tier != kHostTier || entry->shared) {
    return absl::FailedPreconditionError(absl::StrCat(
        Describe(rows, page), entry->shared ? " is another sequence's, too" : " has moved below",
        entry->shared ? "" : " host memory", ": it cannot be written any more"));
  }
  const int first_row = spec_.geometry.RowOf(rows.first_position);
  std::byte* const to = slab_.At(entry->offset) + int64_t{first_row} * spec_.geometry.row_bytes;
  // The answer to an earlier call may have been lost: committed rows may come
  // again with the same bytes, others would change what readers have seen.
  const int64_t committed =
      std::clamp<int64_t>(Watermark(rank) - rows.first_position, 0, rows.num_positions);
  const std::span<const std::byte> replayed =
      bytes.first(static_cast<size_t>(committed * spec_.geometry.row_bytes));
  if (std::memcmp(to, replayed.data(), replayed.size()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("first_position is ", rows.first_position,
                                                      ", positions below ", Watermark(rank),
                                                      " are committed"));
  }
  if (committed == rows.num_positions) return absl::OkStatus();
  if (first_row > entry->rows_written) {
    return absl::FailedPreconditionError(absl::StrCat(Describe(rows, page), ": row ", first_row,
                                                      " comes after row ", entry->rows_written,
                                                      ", which has not been written"));
  }
  CopyIn(*entry, first_row + static_cast<int>(committed), bytes.subspan(replayed.size()));
  entry->sealed = false;
  Touch(KeyOf(rows.layer, rows.kv_head, page));
  // It was offered the slab and could not map it, or did not want to.
  if (streamers_.insert(rank).second) NoteChange();
  if (writers_.erase(rank) > 0) NoteChange();
  entry->rows_written =
      std::max<int32_t>(entry->rows_written, first_row + static_cast<int>(rows.num_positions));
  return absl::OkStatus();
}

// Of a page that comes whole the checksum costs nothing while it is copied. (What a rank writes
// in place may be anywhere.) Many rows are not read soon, single ones may be.
void SequencePages::CopyIn(PageEntry& entry, int first_row, std::span<const std::byte> rows) {
  const std::span<std::byte> page = PageBytes(entry);
  entry.summed = !entry.direct && rows.size() == page.size();
  if (entry.summed) {
    entry.crc = CopyWithCrc32c(rows, page.data());
    return;
  }
  std::byte* const to = page.data() + int64_t{first_row} * spec_.geometry.row_bytes;
  rows.size() < kManyBytes ? CopyBytes(rows, to) : StoreBytes(rows, to);
}

// A commit usually covers few positions of many pages: look those up; where it
// covers more than there is, walk what there is.
std::vector<SequencePages::Key> SequencePages::ReservedKeys(const PageRange& range) const {
  std::vector<Key> keys;
  const int64_t heads = int64_t{spec_.geometry.num_layers} * range.heads.count;
  if (range.num_pages * heads <= num_pages()) {
    ForEachPage(range, spec_.geometry.num_layers, [&](int layer, int head, int64_t page) {
      const auto found = pages_.find(KeyOf(layer, head, page));
      if (found != pages_.end() && found->second.rank == range.rank) keys.push_back(found->first);
    });
    return keys;
  }
  for (const auto& [key, entry] : pages_) {
    const int64_t page = PageOfKey(key) - range.first_page;
    if (entry.rank == range.rank && page >= 0 && page < range.num_pages) keys.push_back(key);
  }
  return keys;
}

absl::Status SequencePages::CheckWritten(Key key, const PageEntry& entry, int64_t tokens) const {
  if (entry.direct && !streamers_.contains(entry.rank)) return absl::OkStatus();
  const int64_t page_tokens = spec_.geometry.page_tokens;
  const int64_t want = std::min(page_tokens, tokens - PageOfKey(key) * page_tokens);
  if (entry.rows_written >= want) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "tokens is ", tokens, ", but page ", PageOfKey(key), ", layer ", key >> 10 & 1023,
      ", kv_head ", key & 1023, " has ", entry.rows_written, " rows written, want ", want));
}

absl::Status SequencePages::Commit(int rank, int64_t tokens) {
  if (rank < 0 || rank >= spec_.num_ranks) {
    return OutOfRange("ranks", rank, 1, spec_.num_ranks);
  }
  if (tokens < 0 || tokens > spec_.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens is ", tokens, ", want 0 to ", spec_.max_tokens));
  }
  const int64_t committed = Watermark(rank);
  if (tokens <= committed) return absl::OkStatus();
  const auto heads = heads_.find(rank);
  PageRange range = {.rank = rank};
  if (heads != heads_.end()) range.heads = heads->second;
  range.first_page = spec_.geometry.PageOf(committed);
  range.num_pages = spec_.geometry.PagesFor(tokens) - range.first_page;
  const std::vector<Key> keys = ReservedKeys(range);
  for (const Key key : keys) HW_RETURN_IF_ERROR(CheckWritten(key, pages_.at(key), tokens));
  PublishWatermark(WatermarkCell(rank), tokens);
  for (const Key key : keys) {
    if ((PageOfKey(key) + 1) * spec_.geometry.page_tokens <= tokens) Seal(key, pages_.at(key));
  }
  return absl::OkStatus();
}

std::span<std::byte> SequencePages::PageBytes(const PageEntry& entry) const {
  return {slab_.At(entry.offset), static_cast<size_t>(spec_.geometry.page_bytes())};
}

void SequencePages::Seal(Key key, PageEntry& entry) {
  Touch(key);
  if (!entry.summed) entry.crc = Crc32c(PageBytes(entry));
  entry.summed = false;
  entry.sealed = true;
}

absl::StatusOr<std::optional<PagePlace>> SequencePages::Read(const RowRange& rows,
                                                             std::span<std::byte> bytes) {
  HW_RETURN_IF_ERROR(CheckRows(rows, bytes.size()));
  HW_ASSIGN_OR_RETURN(PageEntry* const entry, Find(rows));
  const int64_t page = spec_.geometry.PageOf(rows.first_position);
  const int64_t watermark = WatermarkOf(*entry);
  const int64_t end = rows.first_position + rows.num_positions;
  if (end > watermark) {
    return absl::OutOfRangeError(absl::StrCat(Describe(rows, page), ": positions up to ", end,
                                              " asked for, ", watermark, " are committed"));
  }
  if (entry->tier != kHostTier) return PlaceOf(KeyOf(rows.layer, rows.kv_head, page), *entry);
  if (!entry->sealed && (page + 1) * spec_.geometry.page_tokens <= watermark) {
    Seal(KeyOf(rows.layer, rows.kv_head, page), *entry);
  }
  const std::span<const std::byte> whole = PageBytes(*entry);
  const size_t first =
      int64_t{spec_.geometry.RowOf(rows.first_position)} * spec_.geometry.row_bytes;
  if (!entry->sealed) {
    CopyBytes(whole.subspan(first, bytes.size()), bytes.data());
    return std::nullopt;
  }
  // The copy is checked, not the original, so that what is returned is what was
  // checked.
  uint32_t crc = Crc32c(whole.first(first));
  crc = CopyWithCrc32c(whole.subspan(first, bytes.size()), bytes.data(), crc);
  crc = Crc32c(whole.subspan(first + bytes.size()), crc);
  if (crc == entry->crc) return std::nullopt;
  return absl::DataLossError(
      absl::StrCat(Describe(rows, page), ": checksum is ", crc, ", want ", entry->crc));
}

std::atomic<int64_t>& SequencePages::WatermarkCell(int rank) const {
  return slab_.Watermark(CellOffset(rank));
}

int64_t SequencePages::CellOffset(int rank) const {
  const auto moved = cells_.find(rank);
  return moved == cells_.end() ? watermarks_offset_ + rank * kWatermarkCellBytes : moved->second;
}

int64_t SequencePages::Watermark(int rank) const {
  if (rank < 0 || rank >= spec_.num_ranks) return 0;
  // The cell is memory of a rank: whatever it holds, it opens no other position.
  return std::clamp<int64_t>(WatermarkCell(rank).load(std::memory_order_acquire), 0,
                             spec_.max_tokens);
}

bool SequencePages::IsSkipped(int rank, int64_t page) const {
  const auto spans = skipped_.find(rank);
  return spans != skipped_.end() &&
         std::any_of(spans->second.begin(), spans->second.end(),
                     [&](const PageSpan& span) { return page >= span.begin && page < span.end; });
}

absl::Status SequencePages::CheckSkip(int rank, int64_t first_page, int64_t num_pages) const {
  if (rank < 0 || rank >= spec_.num_ranks) return OutOfRange("ranks", rank, 1, spec_.num_ranks);
  const int64_t limit = spec_.geometry.PagesFor(spec_.max_tokens);
  if (!Within(first_page, num_pages, limit)) {
    return OutOfRange("pages", first_page, num_pages, limit);
  }
  if (num_pages > kMaxPagesPerReservation) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_pages is ", num_pages, ", want ", kMaxPagesPerReservation, " or fewer in one call"));
  }
  const int64_t watermark = Watermark(rank);
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    if (page * spec_.geometry.page_tokens >= watermark) break;
    if (IsSkipped(rank, page)) continue;
    return absl::FailedPreconditionError(absl::StrCat("page ", page,
                                                      " begins below the rank's watermark ",
                                                      watermark, ": it may have been read"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> SequencePages::Skip(int rank, int64_t first_page,
                                                         int64_t num_pages) {
  HW_RETURN_IF_ERROR(CheckSkip(rank, first_page, num_pages));
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    if (IsSkipped(rank, page)) continue;
    std::vector<PageSpan>& spans = skipped_[rank];
    if (spans.empty() || spans.back().end != page) spans.push_back({page, page});
    spans.back().end = page + 1;
    NoteChange();
  }
  PageRange range = {.rank = rank, .first_page = first_page, .num_pages = num_pages};
  if (const auto heads = heads_.find(rank); heads != heads_.end()) range.heads = heads->second;
  std::vector<int64_t> offsets;
  for (const Key key : ReservedKeys(range)) {
    // Of one below its copy stays until the sequence ends: nobody finds it.
    if (pages_.at(key).tier == kHostTier) {
      LetGo(pages_.at(key), &offsets);
    } else {
      --num_below_;
    }
    SetResting(key, pages_.at(key), false);
    MarkShared(pages_.at(key), false);
    pages_.erase(key);
    Touch(key);
  }
  return offsets;
}

std::vector<int64_t> SequencePages::TakeUncommitted(int rank) {
  std::vector<int64_t> offsets;
  const int64_t watermark = Watermark(rank);
  absl::erase_if(pages_, [&](auto& item) {
    const bool own = item.second.rank == rank || item.second.rank == kNoRank;
    if (!own || PageOfKey(item.first) * spec_.geometry.page_tokens < watermark) return false;
    // Of a sequence that went back: whoever moves the page, or has it, looks for it here.
    if (item.second.tier != kHostTier || item.second.moving) return false;
    LetGo(item.second, &offsets);
    SetResting(item.first, item.second, false);
    MarkShared(item.second, false);
    Touch(item.first);
    return true;
  });
  return offsets;
}

std::vector<int64_t> SequencePages::TakeAll() {
  std::vector<int64_t> offsets;
  offsets.reserve(pages_.size());
  for (const auto& [key, entry] : pages_) {
    if (entry.tier == kHostTier) offsets.push_back(entry.offset);
  }
  for (const auto& [rank, memory] : contested_) {
    offsets.insert(offsets.end(), memory.pages.begin(), memory.pages.end());
  }
  num_contested_ = 0;
  pages_.clear();
  resting_in_slab_.clear();
  num_below_ = num_resting_ = num_shared_ = 0;
  return offsets;
}

absl::Status SequencePages::Extend(int64_t max_tokens) {
  if (num_below_ > 0) {
    const PagePlace below = PagesBelow(kAllTokens).front();
    return absl::UnavailableError(absl::StrCat(num_below_, " pages do not lie in host memory, ",
                                               heavywater::Describe(below.key), " among them"));
  }
  spec_.max_tokens = std::max(spec_.max_tokens, max_tokens);
  for (int rank = 0; rank < spec_.num_ranks; ++rank) awaited_.insert(rank);
  NoteChange();
  return absl::OkStatus();
}

void SequencePages::Truncate(int64_t tokens) {
  for (int rank = 0; rank < spec_.num_ranks; ++rank) {
    if (Watermark(rank) > tokens) WatermarkCell(rank).store(tokens, std::memory_order_release);
  }
  // What was given up from there on may come after all.
  const int64_t end = spec_.geometry.PagesFor(tokens);
  for (auto& [rank, spans] : skipped_) {
    std::erase_if(spans, [end](const PageSpan& span) { return span.begin >= end; });
    for (PageSpan& span : spans) span.end = std::min(span.end, end);
    NoteChange();
  }
  for (auto& [key, entry] : pages_) {
    const int64_t left = std::max<int64_t>(0, tokens - PageOfKey(key) * spec_.geometry.page_tokens);
    if (entry.rows_written <= left) continue;
    entry.rows_written = static_cast<int32_t>(left);
    Touch(key);
  }
}

void SequencePages::StopWriter(int rank) {
  if (rank < 0 || rank >= spec_.num_ranks) return;
  awaited_.erase(rank);
  if (writers_.erase(rank) > 0) NoteChange();
  // Whoever comes next for the rank may map the slab.
  if (streamers_.erase(rank) > 0) NoteChange();
  if (stopped_.insert(rank).second) NoteChange();
}

std::vector<WrittenPart> SequencePages::Written() const {
  std::vector<WrittenPart> parts;
  for (const auto& [rank, heads] : heads_) parts.push_back({rank, heads, Watermark(rank)});
  return parts;
}

}  // namespace heavywater
