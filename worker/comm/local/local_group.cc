#include "worker/comm/local/local_group.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {

LocalGroup::LocalGroup(int size, absl::Duration timeout)
    : timeout_(timeout), calls_(size), data_(size), arrived_(size), broken_(size) {
  HW_CHECK(size > 0);
}

absl::Status LocalGroup::Begin(const CallHeader& call, std::span<const std::byte> data,
                               absl::Duration timeout) {
  const int rank = call.rank;
  {
    MutexLock lock(&mutex_);
    if (!broken_[rank].ok()) return broken_[rank];
    calls_[rank] = call;
    data_[rank] = data;
    HW_RETURN_IF_ERROR(Arrive(rank, timeout));
  }
  // Every rank compares the same calls, so all come to the same verdict.
  absl::Status same = CheckCalls(calls_);
  if (same.ok()) return same;
  MutexLock lock(&mutex_);
  --num_unfinished_;
  if (broken_[rank].ok()) broken_[rank] = same;
  return broken_[rank];
}

absl::Status LocalGroup::Arrive(int rank, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  arrived_[rank] = true;
  if (++num_arrived_ == size()) {
    std::fill(arrived_.begin(), arrived_.end(), false);
    num_arrived_ = 0;
    num_unfinished_ = size();
    ++generation_;
    GrowScratch();
    changed_.SignalAll();
    return absl::OkStatus();
  }
  const int64_t generation = generation_;
  while (generation_ == generation && broken_[rank].ok()) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      broken_[rank] = MissingRanks(timeout);
      BreakOthers(rank, broken_[rank]);
      break;
    }
    changed_.WaitWithTimeout(&mutex_, left);
  }
  return generation_ != generation ? absl::OkStatus() : broken_[rank];
}

absl::Status LocalGroup::Finish(int rank) {
  MutexLock lock(&mutex_);
  if (--num_unfinished_ == 0) changed_.SignalAll();
  while (num_unfinished_ > 0) changed_.Wait(&mutex_);
  return broken_[rank];
}

void LocalGroup::GrowScratch() {
  int64_t bytes = 0;
  for (const CallHeader& call : calls_) {
    if (call.op != CallOp::kAllReduceSum) continue;
    bytes = std::max<int64_t>(bytes, data_[call.rank].size());
  }
  if (bytes <= scratch_bytes_) return;
  scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  scratch_bytes_ = bytes;
}

absl::Status LocalGroup::MissingRanks(absl::Duration timeout) const {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (!arrived_[rank]) missing.push_back(rank);
  }
  return absl::DeadlineExceededError(absl::StrCat("waited ", absl::FormatDuration(timeout),
                                                  " for ranks ", absl::StrJoin(missing, ",")));
}

void LocalGroup::BreakOthers(int rank, const absl::Status& status) {
  for (int other = 0; other < size(); ++other) {
    if (other != rank && broken_[other].ok()) broken_[other] = status;
  }
  changed_.SignalAll();
}

void LocalGroup::Abort(int rank, const absl::Status& reason) {
  MutexLock lock(&mutex_);
  if (broken_[rank].ok()) broken_[rank] = reason;
  BreakOthers(rank,
              absl::UnavailableError(absl::StrCat("rank ", rank, " aborted: ", reason.ToString())));
}

void LocalGroup::Leave(int rank) {
  MutexLock lock(&mutex_);
  BreakOthers(rank, absl::UnavailableError(absl::StrCat("rank ", rank, " has left the group")));
}

}  // namespace heavywater
