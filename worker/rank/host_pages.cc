#include "worker/rank/host_pages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

PageGeometry GeometryOf(const KvShape& shape) {
  return {.num_layers = shape.num_layers,
          .num_kv_heads = shape.total_kv_heads,
          .page_tokens = shape.page_tokens,
          .row_bytes = shape.row_bytes()};
}

// Appends [begin, end), joined to the last range where they touch.
void AddRange(int64_t begin, int64_t end, std::vector<PositionRange>& ranges) {
  if (begin >= end) return;
  if (!ranges.empty() && ranges.back().end == begin) {
    ranges.back().end = static_cast<Position>(end);
    return;
  }
  ranges.push_back({static_cast<Position>(begin), static_cast<Position>(end)});
}

}  // namespace

absl::StatusOr<HostPages> HostPages::Open(const RankCacheOptions& options, HostTier* tier,
                                          SequenceId sequence,
                                          const SequenceOptions& sequence_options) {
  HostPages pages;
  pages.geometry_ = GeometryOf(options.shape);
  pages.heads_ = {options.shape.first_kv_head, options.shape.num_kv_heads};
  pages.sequence_ = sequence;
  pages.on_host_full_ = sequence_options.on_host_full;
  pages.reserve_ahead_tokens_ = options.reserve_ahead_tokens;
  pages.max_tokens_ = sequence_options.max_tokens;
  if (tier == nullptr) return pages;
  if (options.rank % options.ranks_per_kv_head() != 0) {
    pages.role_ = Role::kOtherRank;
    return pages;
  }
  HW_RETURN_IF_ERROR(tier->OpenSequence(sequence, pages.geometry_, pages.heads_));
  pages.role_ = Role::kWriter;
  pages.tier_ = tier;
  HW_RETURN_IF_ERROR(pages.ReservePrompt(
      std::max(sequence_options.prompt_tokens, sequence_options.restored_tokens)));
  // What is stored already may be others' pages, too.
  pages.written_tokens_ = tier->StoredTokens(sequence);
  return pages;
}

HostPages& HostPages::operator=(HostPages&& other) noexcept {
  if (this == &other) return *this;
  Close();
  role_ = std::exchange(other.role_, Role::kNoTier);
  tier_ = std::exchange(other.tier_, nullptr);
  sequence_ = other.sequence_;
  on_host_full_ = other.on_host_full_;
  geometry_ = other.geometry_;
  heads_ = other.heads_;
  reserve_ahead_tokens_ = other.reserve_ahead_tokens_;
  max_tokens_ = other.max_tokens_;
  backed_ = std::move(other.backed_);
  written_tokens_ = other.written_tokens_;
  next_attempt_page_ = other.next_attempt_page_;
  return *this;
}

void HostPages::Close() {
  if (tier_ != nullptr) tier_->CloseSequence(sequence_);
  tier_ = nullptr;
}

absl::Status HostPages::Reserve(int64_t end_page) {
  const int64_t first = static_cast<int64_t>(backed_.size());
  if (first >= end_page) return absl::OkStatus();
  HW_RETURN_IF_ERROR(tier_->Reserve(sequence_, first, end_page - first));
  backed_.resize(end_page, true);
  return absl::OkStatus();
}

absl::Status HostPages::ReservePrompt(int64_t prompt_tokens) {
  const int64_t ahead = std::min(prompt_tokens + reserve_ahead_tokens_, max_tokens_);
  if (Reserve(geometry_.PagesFor(ahead)).ok()) return absl::OkStatus();
  return Reserve(geometry_.PagesFor(prompt_tokens));
}

absl::Status HostPages::Prepare(int64_t begin, int64_t end) {
  if (role_ != Role::kWriter) return absl::OkStatus();
  const int64_t needed_pages = geometry_.PagesFor(end);
  const int64_t known_pages = static_cast<int64_t>(backed_.size());
  const bool is_needed = needed_pages > known_pages;
  const int64_t ahead =
      geometry_.PagesFor(std::max(std::min(end + reserve_ahead_tokens_, max_tokens_), end));
  if (ahead <= known_pages) return absl::OkStatus();
  if (!is_needed && geometry_.PageOf(end) < next_attempt_page_) return absl::OkStatus();
  if (Reserve(ahead).ok()) return absl::OkStatus();

  // Not so often again: a call may wait for the network.
  next_attempt_page_ = geometry_.PageOf(end) + 1;
  if (!is_needed) return absl::OkStatus();
  const absl::Status status = Reserve(needed_pages);
  if (status.ok()) return status;
  if (absl::IsResourceExhausted(status) && on_host_full_ == OnHostFull::kStop) return status;
  // The page might still come, too late for its first rows.
  tier_->Skip(sequence_, known_pages, needed_pages - known_pages);
  backed_.resize(needed_pages, false);
  return absl::OkStatus();
}

void HostPages::FillRows(int layer, int64_t begin, int64_t end, std::span<HostRow> rows) const {
  if (role_ != Role::kWriter) return;
  for (int64_t position = begin; position < end;) {
    const int64_t page = geometry_.PageOf(position);
    const int64_t page_end = std::min(end, (page + 1) * geometry_.page_tokens);
    for (int head = 0; head < heads_.count && backed_[page]; ++head) {
      std::byte* memory = tier_->Page(sequence_, layer, heads_.first + head, page);
      if (memory == nullptr) continue;
      // A sealed page stays as it is, bit for bit.
      for (int64_t p = std::max(position, written_tokens_); p < page_end; ++p) {
        rows[(p - begin) * heads_.count + head].row =
            memory + int64_t{geometry_.RowOf(p)} * geometry_.row_bytes;
      }
    }
    position = page_end;
  }
}

absl::Status HostPages::TakeOver(int64_t tokens, int64_t known_tokens) {
  const int64_t stored = role_ == Role::kWriter ? tier_->StoredTokens(sequence_) : 0;
  if (stored < tokens || first_unbacked() < tokens) {
    return absl::DataLossError(absl::StrCat("host pages hold ", stored, " tokens of sequence ",
                                            sequence_, ", want ", tokens));
  }
  // Rows that are not written again must lie in memory that has them: a page that comes
  // later, held by this process while the service is away, would not.
  const int64_t written = std::min(stored, known_tokens);
  if (role_ == Role::kWriter) HW_RETURN_IF_ERROR(Reserve(geometry_.PagesFor(written)));
  if (role_ == Role::kWriter && tier_->StoredTokens(sequence_) < written) {
    return absl::UnavailableError(absl::StrCat("the pages of ", written, " tokens of sequence ",
                                               sequence_, " cannot be had now"));
  }
  written_tokens_ = written;
  return absl::OkStatus();
}

std::vector<const std::byte*> HostPages::AllPages(int layer) const {
  const auto num_pages = static_cast<int64_t>(backed_.size());
  std::vector<const std::byte*> pages;
  for (int head = 0; head < heads_.count; ++head) {
    for (int64_t page = 0; page < num_pages; ++page) pages.push_back(Page(layer, head, page));
  }
  return pages;
}

bool HostPages::has_copy(Position position) const {
  const int64_t page = geometry_.PageOf(position);
  return readable() && page < static_cast<int64_t>(backed_.size()) && backed_[page];
}

const std::byte* HostPages::Page(int layer, int head, int64_t page) const {
  const bool decided = role_ == Role::kWriter && page < static_cast<int64_t>(backed_.size());
  if (!decided || !backed_[page]) return nullptr;
  return tier_->Page(sequence_, layer, heads_.first + head, page);
}

std::vector<PageId> HostPages::OfModel(std::span<const PageId> pages) const {
  std::vector<PageId> of_model(pages.begin(), pages.end());
  for (PageId& page : of_model) page.kv_head += heads_.first;
  return of_model;
}

std::vector<PageId> HostPages::TakeGone() const {
  std::vector<PageId> pages = tier_->TakeGone(sequence_);
  for (PageId& page : pages) page.kv_head -= heads_.first;
  return pages;
}

int64_t HostPages::first_unbacked() const {
  if (!readable()) return 0;
  const auto first = std::find(backed_.begin(), backed_.end(), false);
  if (first == backed_.end()) return std::numeric_limits<int64_t>::max();
  return (first - backed_.begin()) * geometry_.page_tokens;
}

void HostPages::Publish(int64_t tokens) {
  if (role_ == Role::kWriter) tier_->Publish(sequence_, tokens);
}

std::vector<PositionRange> HostPages::Unbacked(int64_t tokens) const {
  std::vector<PositionRange> ranges;
  if (role_ == Role::kNoTier || is_lost()) {
    AddRange(0, tokens, ranges);
    return ranges;
  }
  for (int64_t page = 0; page < static_cast<int64_t>(backed_.size()); ++page) {
    const int64_t begin = page * geometry_.page_tokens;
    if (!backed_[page]) AddRange(begin, std::min(begin + geometry_.page_tokens, tokens), ranges);
  }
  return ranges;
}

int64_t HostPages::reserved_bytes() const {
  if (is_lost()) return 0;
  const int64_t pages = std::count(backed_.begin(), backed_.end(), true);
  return pages * geometry_.num_layers * heads_.count * geometry_.page_bytes();
}

}  // namespace heavywater
