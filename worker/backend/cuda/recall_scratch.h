// Scratch of recall in a wave of Attend(), beside that of attend_wave.h. No CUDA
// header: memory is planned on machines without a toolkit, too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heavywater {
struct KvShape;
struct RecallLimits;
}  // namespace heavywater

namespace heavywater::cuda {

// The scan of a KV head is spread over parts, as many as the pages keep busy.
inline constexpr int kScanWarps = 8;  // of a part: a page each
inline constexpr int kMaxScanParts = 32;
constexpr int ScanParts(int64_t num_pages) {
  const int64_t parts = (num_pages + kScanWarps - 1) / kScanWarps;
  return static_cast<int>(parts < 1 ? 1 : parts > kMaxScanParts ? kMaxScanParts : parts);
}

struct RecallScratch {
  // Best candidates of each part, as keys (picks_select.h).
  uint64_t* candidates = nullptr;     // [tokens][num_kv_heads][kMaxScanParts][stride]
  int32_t* num_candidates = nullptr;  // [tokens][num_kv_heads][kMaxScanParts]
  double* masses = nullptr;  // [tokens][num_query_heads][kMaxScanParts] of unpicked positions
  int64_t stride = 0;        // the most picks of a query
};

// Never less for more of anything; 0 without recall.
int64_t RecallScratchBytes(const KvShape& shape, const RecallLimits& limits, int64_t num_tokens);

// `memory` is 256-byte aligned and has RecallScratchBytes().
RecallScratch CutRecallScratch(const KvShape& shape, const RecallLimits& limits, int64_t num_tokens,
                               std::byte* memory);

}  // namespace heavywater::cuda
