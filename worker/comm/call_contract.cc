#include "worker/comm/call_contract.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

const char* OpName(CallOp op) {
  switch (op) {
    case CallOp::kConnect:
      return "Connect";
    case CallOp::kAllReduceSum:
      return "AllReduceSum";
    case CallOp::kAllGather:
      return "AllGather";
    case CallOp::kBroadcast:
      return "Broadcast";
    case CallOp::kBarrier:
      return "Barrier";
    case CallOp::kLeave:
      return "Leave";
    case CallOp::kSettle:
      return "Settle";
  }
  return "unknown operation";
}

const char* TypeName(CallType type) {
  switch (type) {
    case CallType::kNone:
      return "";
    case CallType::kFloat32:
      return "float32";
    case CallType::kInt64:
      return "int64";
    case CallType::kByte:
      return "bytes";
  }
  return "unknown type";
}

bool SameCall(const CallHeader& a, const CallHeader& b) {
  if (a.magic != b.magic || a.op != b.op || a.type != b.type || a.root != b.root ||
      a.sequence != b.sequence) {
    return false;
  }
  return a.op == CallOp::kBroadcast || a.length == b.length;
}

std::string DescribeRanks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ","));
}

// The calls that differ, each with its ranks, in order of the first rank.
std::string DescribeDifference(std::span<const CallHeader> headers) {
  std::vector<std::pair<CallHeader, std::vector<int>>> calls;
  for (int rank = 0; rank < static_cast<int>(headers.size()); ++rank) {
    auto known = calls.begin();
    while (known != calls.end() && !SameCall(known->first, headers[rank])) ++known;
    if (known == calls.end()) known = calls.insert(known, {headers[rank], {}});
    known->second.push_back(rank);
  }
  return absl::StrJoin(calls, "; ", [](std::string* out, const auto& call) {
    absl::StrAppend(out, DescribeRanks(call.second), ": ", DescribeCall(call.first), " (call ",
                    call.first.sequence, ")");
  });
}

absl::Status CheckLength(std::span<const CallHeader> headers) {
  if (headers[0].op != CallOp::kBroadcast) return absl::OkStatus();
  const int64_t bytes = headers[headers[0].root].length;
  if (bytes <= kMaxBroadcastBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a broadcast from rank ", headers[0].root, " has ",
                                                 bytes, " bytes, want at most ",
                                                 kMaxBroadcastBytes));
}

}  // namespace

std::string DescribeCall(const CallHeader& header) {
  if (header.magic != CallHeader::kMagic) return "a message of another format";
  std::string text = OpName(header.op);
  if (header.op == CallOp::kBroadcast) return absl::StrCat(text, " from rank ", header.root);
  if (header.type == CallType::kNone) return text;
  return absl::StrCat(text, " of ", header.length, " ", TypeName(header.type));
}

absl::Status CheckCalls(std::span<const CallHeader> headers) {
  bool same = true;
  for (const CallHeader& header : headers) same = same && SameCall(header, headers[0]);
  if (same) return CheckLength(headers);
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].magic == CallHeader::kMagic && headers[rank].op == CallOp::kLeave) {
      return absl::UnavailableError(absl::StrCat("rank ", rank, " has left the group"));
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("ranks disagree on a collective, want the same call on every rank; got ",
                   DescribeDifference(headers)));
}

}  // namespace heavywater
