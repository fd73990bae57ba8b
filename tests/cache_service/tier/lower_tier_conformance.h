// What every LowerTier must do. A test file names its tier and how to make it:
//   INSTANTIATE_TEST_SUITE_P(Disk, LowerTierConformance, Values(LowerTierFactory{...}));
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/lower_tier.h"

namespace heavywater {

struct LowerTierFactory {
  std::string name;
  // Empty, with room for so much. Null: skipped, with `reason`.
  std::function<std::unique_ptr<LowerTier>(int64_t total_bytes, std::string* reason)> make;
};

inline constexpr FingerprintId kTestFingerprint = 0xfeedfacecafebeef;

// Bytes that differ for every key.
std::vector<std::byte> TestPage(const PageKey& key, size_t bytes);
inline PageKey TestKey(SequenceId sequence, int64_t page, int layer = 0, int kv_head = 0) {
  return {sequence, kTestFingerprint, layer, kv_head, page};
}
absl::Status PutTestPage(LowerTier& tier, const PageKey& key, size_t bytes);
absl::StatusOr<std::vector<std::byte>> GetPage(LowerTier& tier, const PageKey& key, size_t bytes);

class LowerTierConformance : public ::testing::TestWithParam<LowerTierFactory> {
 protected:
  static constexpr size_t kPageBytes = 64 << 10;

  void Make(int64_t total_bytes);
  absl::Status Put(const PageKey& key) { return PutTestPage(*tier_, key, kPageBytes); }
  absl::StatusOr<std::vector<std::byte>> Get(const PageKey& key) {
    return GetPage(*tier_, key, kPageBytes);
  }
  void ExpectBalanced() const;

  std::unique_ptr<LowerTier> tier_;
};

}  // namespace heavywater
