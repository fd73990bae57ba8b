// A host tier in this process' memory: for simulation and tests, and for the
// pages that a rank keeps before it streams them to the cache service.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/host_tier.h"

namespace heavywater {

// What a device that reaches the pages must hear of their memory, whole pages of the
// system's that no other block has part of. Empty: nothing need be told.
struct HostMemoryHooks {
  std::function<absl::Status(std::span<std::byte>)> on_allocated;  // before its first use
  std::function<absl::Status(std::span<std::byte>)> on_freeing;    // after its last
};

// Used by one thread, as its interface says. CloseSequence() frees the pages: the device
// has finished with them by then, and what the hooks need outlives the tier.
class LocalHostTier final : public HostTier {
 public:
  explicit LocalHostTier(int64_t limit_bytes, HostMemoryHooks hooks = {});
  ~LocalHostTier() override;

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
  // Of memory that on_freeing refused: never used again and never freed, since the device
  // may still reach it.
  int64_t stuck_bytes() const { return stuck_bytes_; }
  // Positions below are published; 0 for an unknown sequence.
  int64_t watermark(SequenceId sequence) const;

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  // All layers and heads of one page number, [layer][head].
  using PageRow = std::unique_ptr<std::byte, Free>;

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

  // Zeroed, and known to the hooks.
  absl::StatusOr<PageRow> Allocate(int64_t row_bytes);
  void Release(PageRow row, int64_t row_bytes);
  void Undo(Sequence& state, const std::vector<int64_t>& pages);

  const int64_t limit_bytes_;
  const HostMemoryHooks hooks_;
  int64_t stuck_bytes_ = 0;
  int64_t reserved_bytes_ = 0;
  absl::flat_hash_map<SequenceId, Sequence> sequences_;
};

}  // namespace heavywater
