#include "tests/worker/rank/flaky_host_tier.h"

#include "cache_service/base/check.h"

namespace heavywater {

absl::Status FlakyHostTier::OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                                         HeadRange heads) {
  const auto [at, is_new] = sequences_.try_emplace(sequence);
  if (!is_new) return absl::AlreadyExistsError("open");
  at->second.geometry = geometry;
  at->second.heads = heads;
  return absl::OkStatus();
}

absl::Status FlakyHostTier::Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  ++num_reserves;
  if (!reserve_status.ok()) return reserve_status;
  Sequence& open = sequences_.at(sequence);
  if (open.lost) return absl::UnavailableError("lost");
  for (int64_t page = first_page; page < first_page + num_pages; ++page) {
    HW_CHECK(!open.skipped.contains(page));
    for (int layer = 0; layer < open.geometry.num_layers; ++layer) {
      for (int head = open.heads.first; head < open.heads.first + open.heads.count; ++head) {
        std::vector<std::byte>& bytes = open.pages[{layer, head, page}];
        if (bytes.empty()) reserved_bytes_ += open.geometry.page_bytes();
        bytes.resize(open.geometry.page_bytes());
      }
    }
  }
  return absl::OkStatus();
}

void FlakyHostTier::Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  Sequence& open = sequences_.at(sequence);
  HW_CHECK(first_page * open.geometry.page_tokens >= open.watermark);
  for (int64_t page = first_page; page < first_page + num_pages; ++page) open.skipped.insert(page);
}

std::byte* FlakyHostTier::Page(SequenceId sequence, int layer, int kv_head, int64_t page) {
  Sequence& open = sequences_.at(sequence);
  const auto found = open.pages.find({layer, kv_head, page});
  return found == open.pages.end() ? nullptr : found->second.data();
}

void FlakyHostTier::Publish(SequenceId sequence, int64_t tokens) {
  Sequence& open = sequences_.at(sequence);
  HW_CHECK(tokens >= open.watermark);
  open.watermark = tokens;
}

void FlakyHostTier::Lose(SequenceId sequence) {
  Sequence& open = sequences_.at(sequence);
  for (const auto& [key, bytes] : open.pages) {
    reserved_bytes_ -= static_cast<int64_t>(bytes.size());
  }
  open.pages.clear();
  open.lost = true;
}

void FlakyHostTier::CloseSequence(SequenceId sequence) {
  HW_CHECK(sequences_.contains(sequence));
  Lose(sequence);
  sequences_.erase(sequence);
}

}  // namespace heavywater
