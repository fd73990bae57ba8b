#include "tests/cache_service/tier/fake_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

absl::Status FakeTier::CheckReachable() const {
  if (reachable_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name_, " tier cannot be reached"));
}

absl::Status FakeTier::PutOne(const PageCopy& page) {
  HW_RETURN_IF_ERROR(CheckReachable());
  HW_ASSIGN_OR_RETURN(const bool added,
                      book_.Add(page.key, static_cast<int64_t>(page.bytes.size())));
  if (puts_left_ == 0) {
    if (added) book_.Remove(page.key);
    return absl::ResourceExhaustedError(absl::StrCat(name_, " tier: no space left"));
  }
  --puts_left_;
  const StoredHeader header = MakeStoredHeader(page);
  std::vector<std::byte>& stored = pages_[StoredKey(page.key)];
  stored.assign(header.begin(), header.end());
  stored.insert(stored.end(), page.bytes.begin(), page.bytes.end());
  return absl::OkStatus();
}

std::vector<absl::Status> FakeTier::Put(std::span<const PageCopy> pages) {
  std::function<void()> hook;
  {
    MutexLock lock(&mutex_);
    hook = on_put_;
  }
  if (hook) hook();
  std::vector<absl::Status> statuses;
  MutexLock lock(&mutex_);
  for (const PageCopy& page : pages) statuses.push_back(PutOne(page));
  return statuses;
}

absl::StatusOr<uint32_t> FakeTier::Get(const PageKey& key, std::span<std::byte> bytes) {
  std::function<void()> hook;
  {
    MutexLock lock(&mutex_);
    hook = on_get_;
  }
  if (hook) hook();
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckReachable());
  const auto found = pages_.find(StoredKey(key));
  if (found == pages_.end()) {
    return absl::NotFoundError(absl::StrCat(Describe(key), " is not in the ", name_, " tier"));
  }
  return TakeStoredPage(key, found->second, bytes);
}

absl::Status FakeTier::Erase(std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(CheckReachable());
  for (const PageKey& key : keys) {
    pages_.erase(StoredKey(key));
    book_.Remove(key);
  }
  return absl::OkStatus();
}

absl::Status FakeTier::EraseSequence(SequenceId sequence) {
  return Erase(book_.KeysOf(sequence, static_cast<size_t>(book_.Stats().pages)));
}

void FakeTier::SetReachable(bool reachable) {
  MutexLock lock(&mutex_);
  reachable_ = reachable;
}

void FakeTier::LimitPuts(int pages) {
  MutexLock lock(&mutex_);
  puts_left_ = pages;
}

void FakeTier::OnPut(std::function<void()> hook) {
  MutexLock lock(&mutex_);
  on_put_ = std::move(hook);
}

void FakeTier::OnGet(std::function<void()> hook) {
  MutexLock lock(&mutex_);
  on_get_ = std::move(hook);
}

bool FakeTier::Damage(const PageKey& key) {
  MutexLock lock(&mutex_);
  const auto found = pages_.find(StoredKey(key));
  if (found == pages_.end()) return false;
  found->second.back() ^= std::byte{1};
  return true;
}

bool FakeTier::Lose(const PageKey& key) {
  MutexLock lock(&mutex_);
  return pages_.erase(StoredKey(key)) > 0;
}

bool FakeTier::Holds(const PageKey& key) const {
  MutexLock lock(&mutex_);
  return pages_.contains(StoredKey(key));
}

}  // namespace heavywater
