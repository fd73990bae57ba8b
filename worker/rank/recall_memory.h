// Shapes and bytes of recall: admission's arithmetic, and the budget that a share
// of the device's bytes buys.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/sketch_shape.h"
#include "worker/policy/policy.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/recall_region.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Channels as the policy says; else the default for the head, or a quarter of it where
// the default's sketches would take more than half of device_ratio.
SketchShape SketchShapeOf(const KvShape& shape, const PolicyOptions& policy);

// INVALID_ARGUMENT naming the field when recall cannot work on this rank;
// FAILED_PRECONDITION without a host tier.
absl::Status CheckRecall(const RankCacheOptions& options, const SequenceOptions& sequence,
                         bool has_host_tier);

// The policy's budget for a sequence. With device_ratio, heavy_tokens follows
// from it: the most slots for which slots, scores, tables and sketches of one KV
// head, each as if it were alone on its rank, stay within the ratio of the full
// cache's bytes (the prompt's tokens, rounded up to a page). That does not depend
// on the number of ranks.
absl::StatusOr<Budget> ResolveSequenceBudget(const KvShape& shape, const SequenceOptions& sequence);

// Whether something is demoted when the prompt ends, in any layer.
bool PromptDemotes(const Budget& budget, int64_t prompt_tokens);

// Device bytes of a sequence's recall when it has max_tokens. `capacity`: slots of a
// set, in the layer with the most.
struct RecallBytes {
  int64_t squares = 0;   // of queries, until channels are chosen
  int64_t channels = 0;  // which they are
  int64_t sketches = 0;  // of all pages
  int64_t tables = 0;    // which positions are demoted
  int64_t scratch = 0;   // of a plan: candidates of one layer, masks of all
  int64_t total() const { return squares + channels + sketches + tables + scratch; }
};
RecallBytes RecallBytesOf(const RankCacheOptions& options, const Budget& budget,
                          const SequenceOptions& sequence, int64_t capacity);

// What the backend's scratch must be enough for.
RecallLimits RecallLimitsOf(const RankCacheOptions& options, const SequenceOptions& sequence);

// Its part of a step's buffer, from `begin`; of size 0 without recall or scores. `num_pages`:
// SequenceRecall::region_pages(), and the most that it can become.
RecallRegion RecallRegionOf(const RankCacheOptions& options, const Budget& budget,
                            const PolicyOptions& policy, int64_t begin, int64_t num_pages);
int64_t MaxRegionPages(const RankCacheOptions& options, const SequenceOptions& sequence);
// Candidates that a set can have in a plan.
int64_t MaxCandidates(const RankCacheOptions& options, const PolicyOptions& policy);

}  // namespace heavywater
