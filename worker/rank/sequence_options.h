// How a sequence is opened on a rank, and what is counted of it.
#pragma once

#include <cstdint>

#include "worker/policy/policy.h"

namespace heavywater {

// When host memory has no room for a sequence's next pages.
enum class OnHostFull {
  kStop,  // the step of that sequence fails with RESOURCE_EXHAUSTED
  kDrop,  // go on; positions without a page are dropped once evicted
};

struct SequenceOptions {
  PolicyOptions policy;
  int64_t prompt_tokens = 0;  // >= 1
  int64_t max_tokens = 0;     // prompt and everything after it, >= prompt_tokens
  OnHostFull on_host_full = OnHostFull::kStop;
};

// resident + demoted + dropped == seen, for each layer and set.
struct SequenceStats {
  Budget budget;  // as resolved
  int64_t prompt_tokens = 0;
  int64_t tokens_seen = 0;        // the next position
  int64_t tokens_resident = 0;    // in every set
  int64_t tokens_demoted = 0;     // seen, not resident, in host pages
  int64_t tokens_dropped = 0;     // in no tier: the largest number over layers and sets
  int64_t tokens_unbacked = 0;    // without a host row, resident or not
  int64_t plans = 0;              // since the prompt
  int64_t device_bytes = 0;       // slots, scores and tables now
  int64_t peak_device_bytes = 0;  // the prompt's whole layer included
  int64_t peak_device_bytes_after_prompt = 0;
  int64_t host_bytes = 0;  // pages reserved
};

}  // namespace heavywater
