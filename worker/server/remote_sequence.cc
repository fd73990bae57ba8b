#include "worker/server/remote_sequence.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {

RemoteSequence::RemoteSequence(SequenceId id, const PageGeometry& geometry, HeadRange heads,
                               std::shared_ptr<SlabView> slab, Backend* backend)
    : id_(id), geometry_(geometry), heads_(heads), backend_(backend), slab_(std::move(slab)) {}

int64_t RemoteSequence::page_row_bytes() const {
  return int64_t{geometry_.num_layers} * heads_.count * geometry_.page_bytes();
}

int64_t RemoteSequence::ungranted_bytes() const {
  int64_t pages = 0;
  for (int64_t page = granted_pages_; page < num_pages(); ++page) pages += is_skipped(page) ? 0 : 1;
  return pages * page_row_bytes();
}

std::byte* RemoteSequence::Page(int layer, int kv_head, int64_t page) const {
  if (page < 0 || page >= num_pages()) return nullptr;
  if (kv_head < heads_.first || kv_head >= heads_.first + heads_.count) return nullptr;
  const PageRow& row = pages_[static_cast<size_t>(page)];
  return row.memory.empty() ? nullptr : row.memory[Index(layer, kv_head)];
}

bool RemoteSequence::MayRest(const PageId& page) const {
  const bool committed = (page.page + 1) * geometry_.page_tokens <= committed_;
  return slab_ != nullptr && committed && page.page < granted_pages_ &&
         pages_[static_cast<size_t>(page.page)].local == nullptr &&
         Page(page.layer, page.kv_head, page.page) != nullptr;
}

std::byte* RemoteSequence::SetMemory(const PageId& page, std::byte* memory) {
  PageRow& row = pages_[static_cast<size_t>(page.page)];
  return std::exchange(row.memory[Index(page.layer, page.kv_head)], memory);
}

absl::Status RemoteSequence::AddLocalPages(int64_t end_page) {
  const size_t count = static_cast<size_t>(geometry_.num_layers) * heads_.count;
  while (num_pages() < end_page) {
    PageRow row;
    HW_ASSIGN_OR_RETURN(row.local, RegisteredMemory::Create(page_row_bytes(), backend_));
    for (size_t i = 0; i < count; ++i) {
      row.memory.push_back(row.local->data() + i * static_cast<size_t>(geometry_.page_bytes()));
    }
    pages_.push_back(std::move(row));
    ++local_pages_;
  }
  return absl::OkStatus();
}

void RemoteSequence::SkipPages(int64_t first_page, int64_t end_page) {
  first_page = std::min(first_page, num_pages());
  // Those that have come meanwhile are given back.
  for (int64_t page = first_page; page < std::min(end_page, num_pages()); ++page) {
    if (is_skipped(page)) continue;
    PageRow& row = pages_[static_cast<size_t>(page)];
    if (row.local != nullptr) --local_pages_;
    row = PageRow();
    ++skipped_pages_;
  }
  while (num_pages() < end_page) {
    pages_.emplace_back();
    ++skipped_pages_;
  }
  granted_pages_ = std::min(granted_pages_, first_page);
}

RemoteSequence::PageSpan RemoteSequence::NextGrant(int64_t end_page) const {
  PageSpan span{granted_pages_, 0, is_skipped(granted_pages_)};
  int64_t end = span.first;
  while (end < end_page && is_skipped(end) == span.skipped) ++end;
  span.count = end - span.first;
  return span;
}

absl::Status RemoteSequence::AddGrant(PageSpan span, std::span<const int64_t> offsets,
                                      int64_t watermark_offset) {
  const int64_t end = span.first + span.count;
  if (slab_ == nullptr) {
    HW_RETURN_IF_ERROR(AddLocalPages(end));
    NoteGranted(span);
    return absl::OkStatus();
  }
  const size_t rows = static_cast<size_t>(geometry_.num_layers) * heads_.count;
  if (offsets.size() != rows * static_cast<size_t>(span.count)) {
    return absl::DataLossError(absl::StrCat("Reserve gave ", offsets.size(), " offsets, want ",
                                            rows * static_cast<size_t>(span.count)));
  }
  std::atomic<int64_t>* watermark = slab_->Watermark(watermark_offset);
  if (watermark == nullptr) {
    return absl::DataLossError(
        absl::StrCat("Reserve gave watermark_offset ", watermark_offset, ", not in the slab"));
  }
  std::vector<std::vector<std::byte*>> addresses(static_cast<size_t>(span.count));
  for (int64_t i = 0; i < span.count; ++i) {
    HW_RETURN_IF_ERROR(SlabAddresses(offsets, i, span.count, addresses[static_cast<size_t>(i)]));
  }
  for (int64_t i = 0; i < span.count; ++i) {
    PlacePage(span.first + i, std::move(addresses[static_cast<size_t>(i)]));
  }
  NoteGranted(span);
  watermark_ = watermark;
  return absl::OkStatus();
}

// Up to the first page that has been skipped while the grant was on its way: the
// service must hear of that one, and gives those after it again.
void RemoteSequence::NoteGranted(PageSpan span) {
  const int64_t end = span.first + span.count;
  if (span.first > granted_pages_) return;
  while (granted_pages_ < end && !is_skipped(granted_pages_)) ++granted_pages_;
}

void RemoteSequence::AddSkip(PageSpan span) {
  if (span.first <= granted_pages_) {
    granted_pages_ = std::max(granted_pages_, span.first + span.count);
  }
}

// Offsets come as [layer][head][page].
absl::Status RemoteSequence::SlabAddresses(std::span<const int64_t> offsets, int64_t page,
                                           int64_t num_pages,
                                           std::vector<std::byte*>& addresses) const {
  const int64_t rows = static_cast<int64_t>(offsets.size()) / num_pages;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t offset = offsets[static_cast<size_t>(row * num_pages + page)];
    std::byte* address = slab_->At(offset, geometry_.page_bytes());
    if (address == nullptr) {
      return absl::DataLossError(absl::StrCat("Reserve gave offset ", offset,
                                              ", not in the slab of ", slab_->bytes(), " bytes"));
    }
    addresses.push_back(address);
  }
  return absl::OkStatus();
}

void RemoteSequence::PlacePage(int64_t page, std::vector<std::byte*> addresses) {
  if (page >= num_pages()) {
    pages_.push_back({.memory = std::move(addresses), .target = {}, .local = nullptr});
  } else if (PageRow& row = pages_[static_cast<size_t>(page)]; row.local != nullptr) {
    row.target = std::move(addresses);
  }
}

void RemoteSequence::Publish(int64_t tokens) {
  published_ = std::max(published_, tokens);
  // Everything lies in the slab: nothing to copy, the step itself commits.
  if (slab_ != nullptr && !has_local_pages()) Committed(CommitEnd());
}

int64_t RemoteSequence::stored() const {
  if (watermark_ == nullptr || has_local_pages() || skipped_pages_ > 0) return 0;
  return watermark_->load(std::memory_order_acquire);
}

int64_t RemoteSequence::CommitEnd() const {
  return std::max(committed_, std::min(published_, granted_pages_ * geometry_.page_tokens));
}

LocalRows RemoteSequence::RowsToMove(int64_t begin, int64_t end) const {
  LocalRows local;
  const auto row_bytes = static_cast<size_t>(geometry_.row_bytes);
  for (int64_t first = begin; first < end;) {
    const int64_t page = geometry_.PageOf(first);
    const int64_t last = std::min(end, (page + 1) * geometry_.page_tokens);
    const PageRow& row = pages_[static_cast<size_t>(page)];
    const size_t offset = static_cast<size_t>(geometry_.RowOf(first)) * row_bytes;
    for (size_t i = 0; row.local != nullptr && i < row.memory.size(); ++i) {
      const auto heads = static_cast<size_t>(heads_.count);
      local.rows.push_back(
          {static_cast<int>(i / heads),
           heads_.first + static_cast<int>(i % heads),
           first,
           {row.memory[i] + offset, static_cast<size_t>(last - first) * row_bytes}});
      local.targets.push_back(row.target.empty() ? nullptr : row.target[i] + offset);
    }
    first = last;
  }
  return local;
}

void LocalRows::CopyToSlab() const {
  for (size_t i = 0; i < rows.size(); ++i) {
    HW_CHECK(targets[i] != nullptr);
    std::memcpy(targets[i], rows[i].rows.data(), rows[i].rows.size());
  }
}

void RemoteSequence::Committed(int64_t tokens) {
  committed_ = std::max(committed_, tokens);
  if (watermark_ != nullptr) PublishWatermark(*watermark_, committed_);
}

}  // namespace heavywater
