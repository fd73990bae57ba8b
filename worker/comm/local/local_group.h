// What the ranks of a local group share: where they meet, and the scratch into
// which they reduce together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "worker/comm/call_contract.h"

namespace heavywater {

// One thread per rank; Abort() and Leave() from any thread.
class LocalGroup {
 public:
  LocalGroup(int size, absl::Duration timeout);

  int size() const { return static_cast<int>(calls_.size()); }
  absl::Duration timeout() const { return timeout_; }

  // Begins a collective: states this rank's call and where its data lies, waits
  // for all ranks and compares. When it returns OK every rank's data may be
  // read until this rank's Finish() returns.
  absl::Status Begin(const CallHeader& call, std::span<const std::byte> data,
                     absl::Duration timeout);
  // Ends it, after every successful Begin(): returns when all ranks have come
  // here, so that nobody reads this rank's data any more. Waits for that even
  // when the group is broken; between the two calls ranks only compute.
  absl::Status Finish(int rank);

  // Between Begin() and Finish() only: what `rank` stated.
  const CallHeader& call(int rank) const { return calls_[rank]; }
  std::span<const std::byte> data(int rank) const { return data_[rank]; }
  // Shared result of an all-reduce, sized by Begin() to the call's data. Each
  // rank writes its own part before Finish() and reads all of it after.
  std::span<std::byte> scratch() { return {scratch_.get(), static_cast<size_t>(scratch_bytes_)}; }

  // This rank's calls return `reason`; the others' UNAVAILABLE naming it.
  void Abort(int rank, const absl::Status& reason);
  void Leave(int rank);

 private:
  // Waits until every rank has arrived.
  absl::Status Arrive(int rank, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BreakOthers(int rank, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MissingRanks(absl::Duration timeout) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GrowScratch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration timeout_;
  // Written by their rank before it arrives, read by all between Begin() and
  // Finish(): those two order the accesses, the mutex alone does not.
  std::vector<CallHeader> calls_;                 // [rank]
  std::vector<std::span<const std::byte>> data_;  // [rank]
  std::unique_ptr<std::byte[]> scratch_;
  int64_t scratch_bytes_ = 0;

  Mutex mutex_;
  CondVar changed_;
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // how often all have arrived
  std::vector<bool> arrived_ ABSL_GUARDED_BY(mutex_);
  int num_arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  int num_unfinished_ ABSL_GUARDED_BY(mutex_) = 0;            // ranks between Begin() and Finish()
  std::vector<absl::Status> broken_ ABSL_GUARDED_BY(mutex_);  // [rank] first error
};

}  // namespace heavywater
