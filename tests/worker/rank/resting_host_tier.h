// A host tier in memory whose pages rest as a test says: what rests is spoilt where it lay, and
// comes back elsewhere.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache_service/tier/local_host_tier.h"

namespace heavywater {

class RestingHostTier final : public HostTier {
 public:
  RestingHostTier() : local_(int64_t{1} << 30) {}

  // What BytesToRest() says, less what has come to rest since it was set.
  int64_t bytes_to_rest = 0;
  // Page numbers that are lost once they have been asked for.
  std::set<int64_t> loses;
  int64_t num_asked = 0;
  // How many of the asked pages come while the rank waits for them, in each wait.
  int64_t comes_awaited = 0;
  int64_t num_waits = 0;
  // Whether a wait for which nothing comes takes the time that it may; and how long they took.
  bool takes_time = false;
  absl::Duration waited;

  // Up to so many of the asked pages come back, the first ones first.
  void Deliver(int64_t max);
  int64_t num_resting() const { return static_cast<int64_t>(below_.size()); }
  int64_t num_on_their_way() const { return static_cast<int64_t>(asked_.size()); }

  absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                            HeadRange heads) override {
    page_bytes_ = geometry.page_bytes();
    return local_.OpenSequence(sequence, geometry, heads);
  }
  absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) override {
    return local_.Reserve(sequence, first_page, num_pages);
  }
  void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) override {
    local_.Skip(sequence, first_page, num_pages);
  }
  std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) override;
  void Publish(SequenceId sequence, int64_t tokens) override { local_.Publish(sequence, tokens); }
  int64_t BytesToRest(SequenceId sequence) override { return bytes_to_rest; }
  void Rest(SequenceId sequence, std::span<const PageId> pages) override;
  void Ask(SequenceId sequence, std::span<const PageId> pages) override;
  void AwaitAsked(SequenceId sequence, absl::Duration max) override {
    ++num_waits;
    Deliver(comes_awaited);
    if (!takes_time || comes_awaited > 0) return;
    absl::SleepFor(max);
    waited += max;
  }
  std::vector<PageId> TakeGone(SequenceId sequence) override;
  bool IsLost(SequenceId sequence) const override { return local_.IsLost(sequence); }
  void CloseSequence(SequenceId sequence) override { local_.CloseSequence(sequence); }
  int64_t reserved_bytes() const override { return local_.reserved_bytes(); }

 private:
  using Key = std::pair<SequenceId, PageId>;

  LocalHostTier local_;
  int64_t page_bytes_ = 0;
  std::map<Key, std::vector<std::byte>> below_;
  std::map<Key, std::vector<std::byte>> returned_;
  std::deque<Key> asked_;
  std::map<SequenceId, std::vector<PageId>> gone_;
  std::vector<std::vector<std::byte>> spoilt_;  // where returned pages lay that rest again
};

}  // namespace heavywater
