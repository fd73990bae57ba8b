// What a sequence takes of a rank's device memory: admission's arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/policy/policy.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Whose attention is summed in one row of scores, on this rank and in the
// reduce. Scope `layer`: one row, reduced. Scope `kv_head`: a row for each own
// head, reduced only where several ranks hold the same head.
struct SetLayout {
  int own_sets = 1;      // of this rank
  int reduced_sets = 1;  // rows in the reduce; 0: nothing to reduce
  int first_own = 0;     // of this rank's sets among the reduced ones

  int rows() const { return reduced_sets > 0 ? reduced_sets : own_sets; }
};
SetLayout SetLayoutOf(const RankCacheOptions& options, Scope scope);
// So many neighbouring ranks hold the same sets.
int HashGroup(const RankCacheOptions& options, Scope scope);

// Slots per set of each layer: what decode needs between two plans for bounded
// policies; everything up to max_tokens, whole pages, for the others.
std::vector<int64_t> SlotCapacities(const RankCacheOptions& options, const Budget& budget,
                                    const SequenceOptions& sequence);
// Layers of which the device holds the whole KV while the prompt runs.
int WholeLayers(const KvShape& shape, const SequenceOptions& sequence);
// Positions that the prompt leaves in each set.
int64_t PromptKept(const LayerBudget& budget, int64_t prompt_tokens);

struct SequenceBytes {
  int64_t layers = 0;  // slots, scores and tables of all layers
  int64_t growth = 0;  // unbounded policies: a layer's new slots while the old are copied
  int64_t step = 0;    // its part of a step's reduce buffer, masks, logits and scratch
  int64_t prompt = 0;  // until the prompt's end: whole KV of WholeLayers(), votes, masks, scratch

  int64_t recall = 0;  // sketches and what goes with them
  int64_t angles = 0;  // Positions::kCacheRelative

  int64_t steady() const { return layers + growth + step + recall + angles; }
  int64_t total() const { return steady() + prompt; }
};
SequenceBytes BytesOf(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                      const Budget& budget, const SequenceOptions& sequence,
                      std::span<const int64_t> capacities);

// Hidden states of all of a prompt's tokens: held while it runs, beside the limit.
int64_t PromptHiddenBytes(int64_t prompt_tokens, int hidden_size);

// Fields that an item has in a step's agreement, and those of the step itself.
inline constexpr int kStepFields = 2;
inline constexpr int kItemFields = 6;
inline constexpr int kPromptFields = 3;

}  // namespace heavywater
