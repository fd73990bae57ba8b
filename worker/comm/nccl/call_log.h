// What ranks need to find that they differ without comparing every call before
// it runs: which calls they have compared before, and what was called since the
// last comparison.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/call_contract.h"

namespace heavywater {

// Of one rank; used by one thread. Ranks that make the same calls hold the same
// log, so they come to the same decisions.
class CallLog {
 public:
  static constexpr size_t kMaxCalls = 1024;  // compared when so many have gathered
  static constexpr size_t kMaxKnown = 4096;  // forgotten, all at once, beyond

  // Whether ranks have agreed on a call of this operation, type and length.
  bool IsKnown(const CallHeader& call) const;
  void AddKnown(const CallHeader& call);

  void Record(const CallHeader& call) { calls_.push_back(call); }
  std::span<const CallHeader> calls() const { return calls_; }
  bool empty() const { return calls_.empty(); }
  bool full() const { return calls_.size() >= kMaxCalls; }
  // Of operations, types and lengths, in order.
  int64_t Digest() const;
  void Clear() { calls_.clear(); }

 private:
  using Signature = std::tuple<CallOp, CallType, int64_t>;
  static Signature SignatureOf(const CallHeader& call) { return {call.op, call.type, call.length}; }

  std::set<Signature> known_;
  std::vector<CallHeader> calls_;
};

// logs[i] is rank i's. FAILED_PRECONDITION naming the first calls that differ and
// their ranks, or how many calls each rank has made; OK when all are alike.
absl::Status CompareLogs(std::span<const std::vector<CallHeader>> logs);

}  // namespace heavywater
