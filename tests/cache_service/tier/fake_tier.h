// A lower tier in this process' memory that fails and waits as a test says.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cache_service/base/mutex.h"
#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/page_book.h"

namespace heavywater {

// Thread safe.
class FakeTier final : public LowerTier {
 public:
  FakeTier(const char* name, int64_t total_bytes) : name_(name), book_(name, total_bytes) {}

  const char* name() const override { return name_; }
  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override;
  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override;
  absl::Status Erase(std::span<const PageKey> keys) override;
  absl::Status EraseSequence(SequenceId sequence) override;
  absl::Status Restore(std::span<const StoredPage> pages) override {
    return book_.Restore(pages).status();
  }
  LowerTierStats Stats() const override { return book_.Stats(); }

  // Every call is UNAVAILABLE meanwhile.
  void SetReachable(bool reachable);
  // The medium takes this many pages more; after that Put() is RESOURCE_EXHAUSTED.
  void LimitPuts(int pages);
  // Called by Put() and by Get() before they do anything, with no lock held.
  void OnPut(std::function<void()> hook);
  void OnGet(std::function<void()> hook);
  // Behind the store's back; false where the page is not there.
  bool Damage(const PageKey& key);
  bool Lose(const PageKey& key);
  bool Holds(const PageKey& key) const;

 private:
  absl::Status CheckReachable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PutOne(const PageCopy& page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const char* const name_;
  PageBook book_;
  mutable Mutex mutex_;
  std::map<std::string, std::vector<std::byte>> pages_ ABSL_GUARDED_BY(mutex_);
  bool reachable_ ABSL_GUARDED_BY(mutex_) = true;
  int puts_left_ ABSL_GUARDED_BY(mutex_) = 1 << 30;
  std::function<void()> on_put_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> on_get_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
