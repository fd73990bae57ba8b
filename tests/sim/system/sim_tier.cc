#include "tests/sim/system/sim_tier.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

absl::Status SimTier::CheckReachable() const {
  if (medium_.reachable) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("simulated: ", name_, " cannot be reached"));
}

absl::Status SimTier::PutOne(const PageCopy& page) {
  HW_RETURN_IF_ERROR(CheckReachable());
  HW_ASSIGN_OR_RETURN(const bool added,
                      book_.Add(page.key, static_cast<int64_t>(page.bytes.size())));
  if (medium_.puts_left <= 0) {
    if (added) book_.Remove(page.key);
    return absl::ResourceExhaustedError(absl::StrCat("simulated: ", name_, " is full"));
  }
  --medium_.puts_left;
  const StoredHeader header = MakeStoredHeader(page);
  std::vector<std::byte>& stored = medium_.pages[StoredKey(page.key)];
  stored.assign(header.begin(), header.end());
  stored.insert(stored.end(), page.bytes.begin(), page.bytes.end());
  return absl::OkStatus();
}

std::vector<absl::Status> SimTier::Put(std::span<const PageCopy> pages) {
  std::vector<absl::Status> statuses;
  for (const PageCopy& page : pages) statuses.push_back(PutOne(page));
  return statuses;
}

absl::StatusOr<uint32_t> SimTier::Get(const PageKey& key, std::span<std::byte> bytes) {
  HW_RETURN_IF_ERROR(CheckReachable());
  const auto found = medium_.pages.find(StoredKey(key));
  if (found == medium_.pages.end()) {
    return absl::NotFoundError(absl::StrCat(Describe(key), " is not in ", name_));
  }
  return TakeStoredPage(key, found->second, bytes);
}

absl::Status SimTier::Erase(std::span<const PageKey> keys) {
  HW_RETURN_IF_ERROR(CheckReachable());
  for (const PageKey& key : keys) {
    medium_.pages.erase(StoredKey(key));
    book_.Remove(key);
  }
  return absl::OkStatus();
}

absl::Status SimTier::EraseSequence(SequenceId sequence) {
  return Erase(book_.KeysOf(sequence, static_cast<size_t>(book_.Stats().pages)));
}

// Also where the medium cannot be reached: what an earlier process left there is then
// erased as if it had been.
absl::Status SimTier::Restore(std::span<const StoredPage> pages) {
  std::set<std::string> kept;
  for (const StoredPage& page : pages) kept.insert(StoredKey(page.key));
  std::erase_if(medium_.pages, [&](const auto& item) { return !kept.contains(item.first); });
  return book_.Restore(pages).status();
}

}  // namespace heavywater
