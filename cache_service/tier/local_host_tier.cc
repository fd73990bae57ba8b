#include "cache_service/tier/local_host_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {

absl::Status LocalHostTier::OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                                         HeadRange heads) {
  HW_RETURN_IF_ERROR(geometry.Validate());
  if (heads.first < 0 || heads.count < 1 || heads.count > geometry.num_kv_heads - heads.first) {
    return absl::InvalidArgumentError(absl::StrCat("heads are [", heads.first, ", ",
                                                   heads.first + heads.count, "), want within [0, ",
                                                   geometry.num_kv_heads, ")"));
  }
  const auto [entry, added] = sequences_.try_emplace(sequence);
  if (!added) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", sequence, " is open already"));
  }
  entry->second.geometry = geometry;
  entry->second.heads = heads;
  return absl::OkStatus();
}

absl::Status LocalHostTier::Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is not open"));
  }
  if (first_page < 0 || num_pages < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages are ", num_pages, " from ", first_page, ", want neither below 0"));
  }
  Sequence& state = entry->second;
  int64_t missing = 0;
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    if (state.skipped.contains(page)) {
      return absl::FailedPreconditionError(
          absl::StrCat("page ", page, " of sequence ", sequence, " was given up"));
    }
    if (!state.pages.contains(page)) ++missing;
  }
  const int64_t free = limit_bytes_ - reserved_bytes_;
  if (missing > free / state.row_bytes()) {
    return absl::ResourceExhaustedError(absl::StrCat("host tier: need ",
                                                     missing * state.row_bytes(), " bytes, ", free,
                                                     " are free of ", limit_bytes_));
  }
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    PageRow& row = state.pages[page];
    if (row == nullptr) row = std::make_unique<std::byte[]>(state.row_bytes());
  }
  reserved_bytes_ += missing * state.row_bytes();
  return absl::OkStatus();
}

void LocalHostTier::Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) return;
  Sequence& state = entry->second;
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    state.skipped.insert(page);
    if (state.pages.erase(page) > 0) reserved_bytes_ -= state.row_bytes();
  }
}

std::byte* LocalHostTier::Page(SequenceId sequence, int layer, int kv_head, int64_t page) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) return nullptr;
  const Sequence& state = entry->second;
  const int head = kv_head - state.heads.first;
  if (layer < 0 || layer >= state.geometry.num_layers || head < 0 || head >= state.heads.count) {
    return nullptr;
  }
  const auto row = state.pages.find(page);
  if (row == state.pages.end()) return nullptr;
  const int64_t index = int64_t{layer} * state.heads.count + head;
  return row->second.get() + index * state.geometry.page_bytes();
}

void LocalHostTier::Publish(SequenceId sequence, int64_t tokens) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) return;
  entry->second.watermark = std::max(entry->second.watermark, tokens);
}

void LocalHostTier::CloseSequence(SequenceId sequence) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) return;
  const Sequence& state = entry->second;
  reserved_bytes_ -= static_cast<int64_t>(state.pages.size()) * state.row_bytes();
  sequences_.erase(entry);
}

int64_t LocalHostTier::watermark(SequenceId sequence) const {
  const auto entry = sequences_.find(sequence);
  return entry == sequences_.end() ? 0 : entry->second.watermark;
}

}  // namespace heavywater
