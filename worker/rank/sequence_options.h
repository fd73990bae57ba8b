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
  // An engine's prompt that goes through all layers more than once, a part of its
  // tokens at a time: every layer stays whole on the device until the last part.
  bool prompt_in_steps = false;
  // A sequence that begins in a snapshot: the tokens that this has seen, whose host
  // pages are there. 0: it begins with its prompt.
  int64_t restored_tokens = 0;
  // Of the prompt, whole pages from its first token on: their K and V lie in its host pages
  // already, from a prompt that began alike (MostStoredTokens()).
  int64_t stored_tokens = 0;
};

// resident + demoted + dropped == seen, for each layer and set.
struct SequenceStats {
  Budget budget;  // as resolved
  int64_t prompt_tokens = 0;
  int64_t tokens_seen = 0;  // the next position
  // Where the policy has other budgets for other layers: the mean over layers, rounded.
  int64_t tokens_resident = 0;    // in every set
  int64_t tokens_demoted = 0;     // seen, not resident, in host pages
  int64_t tokens_dropped = 0;     // in no tier: the largest number over layers and sets
  int64_t tokens_unbacked = 0;    // without a host row, resident or not
  int64_t plans = 0;              // since the prompt
  int64_t device_bytes = 0;       // slots, scores, tables and sketches now
  int64_t peak_device_bytes = 0;  // the prompt's whole layer included
  int64_t peak_device_bytes_after_prompt = 0;
  int64_t host_bytes = 0;  // pages reserved

  // Recall, of this rank's KV heads alone; all 0 without it.
  int64_t recall_queries = 0;    // queries x KV heads x layers that could pick
  int64_t recall_reads = 0;      // positions that they picked, in all
  int64_t recall_reads_max = 0;  // the most of one query, KV head and layer
  int64_t promoted = 0;          // positions that came back into slots, over layers and sets
  double mass_missing = 0;       // estimated share of attention that went to demoted positions
                                 // which were not picked: mean of the last sample
  int64_t sketch_bytes = 0;      // of device_bytes, now
  // Of host pages that rest, as RecallStats has them.
  int64_t pages_resting = 0;
  int64_t pages_rested = 0;
  int64_t pages_asked = 0;
  int64_t pages_returned = 0;
  int64_t pages_lost = 0;
  int64_t missed_picks = 0;
  int64_t waits_given_up = 0;
};

}  // namespace heavywater
