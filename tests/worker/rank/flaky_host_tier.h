// A host tier in memory that fails when it is told to, and that can be looked
// into after a sequence has closed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/tier/host_tier.h"

namespace heavywater {

class FlakyHostTier final : public HostTier {
 public:
  // Of later Reserve() calls; OK: they succeed.
  absl::Status reserve_status;
  int64_t num_reserves = 0;  // calls so far

  absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                            HeadRange heads) override;
  absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) override;
  void Publish(SequenceId sequence, int64_t tokens) override;
  bool IsLost(SequenceId sequence) const override { return sequences_.at(sequence).lost; }
  void CloseSequence(SequenceId sequence) override;
  int64_t reserved_bytes() const override { return reserved_bytes_; }

  // Forgets the sequence's pages, as a service does that has ended it.
  void Lose(SequenceId sequence);
  bool is_open(SequenceId sequence) const { return sequences_.contains(sequence); }
  int64_t watermark(SequenceId sequence) const { return sequences_.at(sequence).watermark; }
  const std::set<int64_t>& skipped(SequenceId sequence) const {
    return sequences_.at(sequence).skipped;
  }

 private:
  struct Sequence {
    PageGeometry geometry;
    HeadRange heads;
    int64_t watermark = 0;
    std::set<int64_t> skipped;  // page numbers
    bool lost = false;
    std::map<std::tuple<int, int, int64_t>, std::vector<std::byte>> pages;
  };

  std::map<SequenceId, Sequence> sequences_;
  int64_t reserved_bytes_ = 0;
};

}  // namespace heavywater
