#include "cache_service/tier/local_host_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int64_t kSystemPageBytes = 4096;

int64_t WholePages(int64_t bytes) {
  return (bytes + kSystemPageBytes - 1) / kSystemPageBytes * kSystemPageBytes;
}

}  // namespace

LocalHostTier::LocalHostTier(int64_t limit_bytes, HostMemoryHooks hooks)
    : limit_bytes_(limit_bytes), hooks_(std::move(hooks)) {}

LocalHostTier::~LocalHostTier() {
  while (!sequences_.empty()) CloseSequence(sequences_.begin()->first);
}

absl::StatusOr<LocalHostTier::PageRow> LocalHostTier::Allocate(int64_t row_bytes) {
  const int64_t bytes = WholePages(row_bytes);
  PageRow row(static_cast<std::byte*>(std::aligned_alloc(kSystemPageBytes, bytes)));
  if (row == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host tier: no memory for a row of pages, ", bytes, " bytes"));
  }
  std::memset(row.get(), 0, bytes);
  if (!hooks_.on_allocated) return row;
  const absl::Status told = hooks_.on_allocated({row.get(), static_cast<size_t>(bytes)});
  if (told.ok()) return row;
  return absl::Status(
      told.code(), absl::StrCat("host tier: a row of pages, ", bytes, " bytes: ", told.message()));
}

void LocalHostTier::Release(PageRow row, int64_t row_bytes) {
  if (!hooks_.on_freeing) return;
  const int64_t bytes = WholePages(row_bytes);
  if (hooks_.on_freeing({row.get(), static_cast<size_t>(bytes)}).ok()) return;
  stuck_bytes_ += bytes;
  row.release();  // NOLINT(bugprone-unused-return-value)
}

void LocalHostTier::Undo(Sequence& state, const std::vector<int64_t>& pages) {
  for (const int64_t page : pages) {
    const auto entry = state.pages.find(page);
    Release(std::move(entry->second), state.row_bytes());
    state.pages.erase(entry);
  }
}

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
  std::vector<int64_t> added;
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    if (state.pages.contains(page)) continue;
    absl::StatusOr<PageRow> row = Allocate(state.row_bytes());
    if (!row.ok()) {
      Undo(state, added);
      return row.status();
    }
    state.pages[page] = *std::move(row);
    added.push_back(page);
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
    if (!state.pages.contains(page)) continue;
    Undo(state, {page});
    reserved_bytes_ -= state.row_bytes();
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
  Sequence& state = entry->second;
  reserved_bytes_ -= static_cast<int64_t>(state.pages.size()) * state.row_bytes();
  for (auto& [page, row] : state.pages) Release(std::move(row), state.row_bytes());
  sequences_.erase(entry);
}

int64_t LocalHostTier::watermark(SequenceId sequence) const {
  const auto entry = sequences_.find(sequence);
  return entry == sequences_.end() ? 0 : entry->second.watermark;
}

}  // namespace heavywater
