// What ranks must agree on before a collective touches data: the call's number,
// operation, type and length. Each rank states it in a header; all compare all.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace heavywater {

enum class CallOp : uint16_t {
  kConnect = 1,  // first exchange of a new group
  kAllReduceSum,
  kAllGather,
  kBroadcast,
  kBarrier,
  kLeave,   // the rank is going away
  kSettle,  // comparison of the calls so far (nccl/call_log.h)
};

enum class CallType : uint16_t { kNone = 0, kFloat32, kInt64, kByte };

// Crosses processes of one build on little-endian machines, so it is copied as
// it lies in memory.
struct CallHeader {
  uint32_t magic = kMagic;
  CallOp op = CallOp::kBarrier;
  CallType type = CallType::kNone;
  int32_t rank = 0;
  int32_t root = -1;      // of a broadcast
  uint64_t sequence = 0;  // number of this call in the group's life, from 1
  int64_t length = 0;     // elements; of a broadcast bytes, and only the root's counts;
                          // of kSettle a digest of the calls

  static constexpr uint32_t kMagic = 0x48574331;  // "HWC1": raise with the format
};
static_assert(sizeof(CallHeader) == 32);

// "AllReduceSum of 5 float32".
std::string DescribeCall(const CallHeader& header);

// headers[i] is rank i's; the result is the same on every rank.
// FAILED_PRECONDITION naming every differing call and its ranks, UNAVAILABLE
// when a rank has left, INVALID_ARGUMENT when a broadcast is too large.
absl::Status CheckCalls(std::span<const CallHeader> headers);

}  // namespace heavywater
