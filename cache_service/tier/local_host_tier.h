// A host tier in this process' memory: for simulation and tests, and for the
// pages that a rank keeps before it streams them to the cache service.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "cache_service/tier/host_tier.h"

namespace heavywater {

// Used by one thread, as its interface says. CloseSequence() frees the pages.
class LocalHostTier final : public HostTier {
 public:
  explicit LocalHostTier(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                            HeadRange heads) override;
  absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) override;
  void Publish(SequenceId sequence, int64_t tokens) override;
  bool IsLost(SequenceId) const override { return false; }
  void CloseSequence(SequenceId sequence) override;
  int64_t reserved_bytes() const override { return reserved_bytes_; }

  int64_t limit_bytes() const { return limit_bytes_; }
  // Positions below are published; 0 for an unknown sequence.
  int64_t watermark(SequenceId sequence) const;

 private:
  // All layers and heads of one page number, [layer][head].
  using PageRow = std::unique_ptr<std::byte[]>;

  struct Sequence {
    PageGeometry geometry;
    HeadRange heads;
    int64_t watermark = 0;
    absl::flat_hash_map<int64_t, PageRow> pages;  // by page number
    absl::flat_hash_set<int64_t> skipped;         // page numbers

    int64_t row_bytes() const {
      return geometry.num_layers * int64_t{heads.count} * geometry.page_bytes();
    }
  };

  const int64_t limit_bytes_;
  int64_t reserved_bytes_ = 0;
  absl::flat_hash_map<SequenceId, Sequence> sequences_;
};

}  // namespace heavywater
