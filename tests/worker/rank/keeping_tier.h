// A rank's host tier for tests in which one process goes on with what another has stored.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "cache_service/tier/host_tier.h"

namespace heavywater {

// Pages outlive the process that wrote them, as in the service's slab.
class KeepingTier final : public HostTier {
 public:
  absl::Status OpenSequence(SequenceId, const PageGeometry& geometry, HeadRange) override {
    geometry_ = geometry;
    return absl::OkStatus();
  }
  absl::Status Reserve(SequenceId, int64_t first, int64_t count) override {
    reserved_pages = std::max(reserved_pages, first + count);
    // From a page on the service does not answer: they lie elsewhere.
    if (reserved_pages > pages_to_take_over) stored = 0;
    return absl::OkStatus();
  }
  void Skip(SequenceId, int64_t, int64_t) override {}
  std::byte* Page(SequenceId, int layer, int kv_head, int64_t page) override {
    std::vector<std::byte>& bytes = pages_[{layer, kv_head, page}];
    bytes.resize(static_cast<size_t>(geometry_.page_bytes()));
    return bytes.data();
  }
  void Publish(SequenceId, int64_t tokens) override { stored = std::max(stored, tokens); }
  int64_t StoredTokens(SequenceId) const override { return stored; }
  bool IsLost(SequenceId) const override { return false; }
  void CloseSequence(SequenceId) override {}
  int64_t reserved_bytes() const override { return 0; }

  // By layer, KV head and page.
  using Pages = std::map<std::tuple<int, int, int64_t>, std::vector<std::byte>>;
  const Pages& pages() const { return pages_; }
  void set_pages(Pages pages) { pages_ = std::move(pages); }
  int64_t stored = 0;
  int64_t reserved_pages = 0;
  int64_t pages_to_take_over = std::numeric_limits<int64_t>::max();

 private:
  PageGeometry geometry_;
  Pages pages_;
};

}  // namespace heavywater
