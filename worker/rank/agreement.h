// What the ranks of a group tell each other inside an integer all-reduce: each
// field has an entry for each rank, every rank fills its own and leaves zeros,
// so after the sum each rank sees all entries and can name those that differ.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace heavywater {

class Agreement {
 public:
  Agreement(int rank, int world_size, int64_t num_fields)
      : rank_(rank), world_size_(world_size), entries_(num_fields * world_size) {}

  void Set(int64_t field, int64_t value) { entries_[field * world_size_ + rank_] = value; }
  int64_t Get(int64_t field, int rank) const { return entries_[field * world_size_ + rank]; }

  // To be reduced, and to be overwritten with the sums.
  std::span<int64_t> entries() { return entries_; }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

  // Ranks [k * group, (k + 1) * group) must have one value each. FAILED_PRECONDITION:
  // "`what` is A on rank 0 and B on rank 2".
  absl::Status CheckEqual(int64_t field, int group, const std::string& what) const;
  absl::Status CheckEqual(int64_t field, const std::string& what) const {
    return CheckEqual(field, world_size_, what);
  }

  // A field of status codes: the first rank that is not OK. Its own rank returns
  // `own`, the others the same code naming the rank.
  absl::Status CheckStatus(int64_t field, const absl::Status& own) const;
  // Whether any rank has set the field to other than 0.
  bool AnySet(int64_t field) const;

 private:
  int rank_;
  int world_size_;
  std::vector<int64_t> entries_;  // [num_fields][world_size]
};

// `status` with `what` before its message.
absl::Status Annotate(const absl::Status& status, const std::string& what);

}  // namespace heavywater
