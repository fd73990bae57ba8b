// A tier below host memory whose medium outlives the process that uses it, and fails as a
// simulation says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/page_book.h"

namespace heavywater {

// The disk, or the other machine.
struct SimMedium {
  std::map<std::string, std::vector<std::byte>> pages;
  bool reachable = true;
  int64_t puts_left = std::numeric_limits<int64_t>::max();  // until it is full
};

// One process' view of a medium, which outlives it. One thread.
class SimTier final : public LowerTier {
 public:
  SimTier(const char* name, int64_t total_bytes, SimMedium& medium)
      : name_(name), medium_(medium), book_(name, total_bytes) {}

  const char* name() const override { return name_; }
  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override;
  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override;
  absl::Status Erase(std::span<const PageKey> keys) override;
  absl::Status EraseSequence(SequenceId sequence) override;
  absl::Status Restore(std::span<const StoredPage> pages) override;
  LowerTierStats Stats() const override { return book_.Stats(); }

 private:
  absl::Status CheckReachable() const;
  absl::Status PutOne(const PageCopy& page);

  const char* const name_;
  SimMedium& medium_;
  PageBook book_;
};

}  // namespace heavywater
