// Whether a sequence can ever fit the device, asked before it waits for room.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// Made when the cache holds no sequence. Thread safe: reads only what of the
// cache never changes.
class MemoryCheck {
 public:
  explicit MemoryCheck(const RankCache& cache);

  // RESOURCE_EXHAUSTED naming need, limit and the longest prompt that fits on
  // an empty device with as many tokens after it.
  absl::Status Check(const SequenceOptions& options) const;

 private:
  bool Fits(const SequenceOptions& options, int64_t prompt_tokens) const;

  const RankCache& cache_;
  const int64_t limit_bytes_;     // 0: none
  const int64_t standing_bytes_;  // held without any sequence
};

}  // namespace heavywater
