#include "worker/comm/nccl/call_log.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {

bool CallLog::IsKnown(const CallHeader& call) const { return known_.contains(SignatureOf(call)); }

void CallLog::AddKnown(const CallHeader& call) {
  if (known_.size() >= kMaxKnown) known_.clear();
  known_.insert(SignatureOf(call));
}

int64_t CallLog::Digest() const {
  // FNV-1a over 64-bit words: not a defence, only unlikely to agree by accident.
  uint64_t digest = 0xcbf29ce484222325;
  const auto add = [&](uint64_t word) {
    digest = (digest ^ word) * 0x100000001b3;
    digest ^= digest >> 32;
  };
  for (const CallHeader& call : calls_) {
    add(static_cast<uint64_t>(call.op));
    add(static_cast<uint64_t>(call.type));
    add(static_cast<uint64_t>(call.length));
  }
  return static_cast<int64_t>(digest);
}

absl::Status CompareLogs(std::span<const std::vector<CallHeader>> logs) {
  HW_CHECK(!logs.empty());
  size_t shortest = logs[0].size();
  size_t longest = shortest;
  for (const std::vector<CallHeader>& log : logs) {
    shortest = std::min(shortest, log.size());
    longest = std::max(longest, log.size());
  }
  for (size_t i = 0; i < shortest; ++i) {
    std::vector<CallHeader> calls;
    for (const std::vector<CallHeader>& log : logs) calls.push_back(log[i]);
    HW_RETURN_IF_ERROR(CheckCalls(calls));
  }
  if (shortest == longest) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks have made different numbers of calls since they last compared them: ",
      absl::StrJoin(logs, ", ", [](std::string* out, const std::vector<CallHeader>& log) {
        absl::StrAppend(out, log.size());
      })));
}

}  // namespace heavywater
