#include "cache_service/tier/page_book.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

PageBook::PackedKey PageBook::Pack(const PageKey& key) {
  return static_cast<uint64_t>(key.page) << 20 | static_cast<uint64_t>(key.layer) << 10 |
         static_cast<uint64_t>(key.kv_head);
}

absl::StatusOr<bool> PageBook::Add(const PageKey& key, int64_t page_bytes) {
  HW_RETURN_IF_ERROR(CheckPageKey(key));
  const int64_t need = StoredBytes(page_bytes);
  int64_t held = 0;  // by the same page at another size, which it replaces
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(key.sequence);
  if (found != sequences_.end()) {
    const Sequence& known = found->second;
    if (known.fingerprint != key.fingerprint) {
      return absl::InvalidArgumentError(
          absl::StrCat(Describe(key), " has fingerprint ", key.fingerprint,
                       ", the sequence's others have ", known.fingerprint));
    }
    const auto there = known.pages.find(Pack(key));
    if (there != known.pages.end() && there->second == page_bytes) return false;
    if (there != known.pages.end()) held = StoredBytes(there->second);
  }
  if (need - held > total_bytes_ - used_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(tier_, " tier: need ", need, " bytes, ",
                                                     total_bytes_ - used_bytes_, " are free of ",
                                                     total_bytes_));
  }
  Sequence& sequence = sequences_[key.sequence];
  sequence.fingerprint = key.fingerprint;
  sequence.pages[Pack(key)] = static_cast<int32_t>(page_bytes);
  used_bytes_ += need - held;
  pages_ += held == 0 ? 1 : 0;
  return held == 0;
}

absl::StatusOr<std::vector<PageKey>> PageBook::Restore(std::span<const StoredPage> pages) {
  std::vector<PageKey> left_out;
  for (const StoredPage& page : pages) {
    const absl::StatusOr<bool> added = Add(page.key, page.page_bytes);
    if (absl::IsResourceExhausted(added.status())) {
      left_out.push_back(page.key);
    } else if (!added.ok()) {
      return absl::DataLossError(added.status().message());
    }
  }
  return left_out;
}

void PageBook::Remove(const PageKey& key) {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(key.sequence);
  if (found == sequences_.end() || found->second.fingerprint != key.fingerprint) return;
  const auto page = found->second.pages.find(Pack(key));
  if (page == found->second.pages.end()) return;
  used_bytes_ -= StoredBytes(page->second);
  found->second.pages.erase(page);
  --pages_;
  if (found->second.pages.empty()) sequences_.erase(found);
}

std::vector<PageKey> PageBook::KeysOf(SequenceId sequence, size_t max) const {
  std::vector<PageKey> keys;
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return keys;
  for (const auto& [packed, bytes] : found->second.pages) {
    if (keys.size() == max) break;
    keys.push_back({.sequence = sequence,
                    .fingerprint = found->second.fingerprint,
                    .layer = static_cast<int>(packed >> 10 & 1023),
                    .kv_head = static_cast<int>(packed & 1023),
                    .page = static_cast<int64_t>(packed >> 20)});
  }
  return keys;
}

LowerTierStats PageBook::Stats() const {
  MutexLock lock(&mutex_);
  return {.total_bytes = total_bytes_,
          .used_bytes = used_bytes_,
          .free_bytes = total_bytes_ - used_bytes_,
          .pages = pages_};
}

}  // namespace heavywater
