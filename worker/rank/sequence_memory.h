// What a sequence takes of a rank's device memory: admission's arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
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

// How a sequence's slots lie on a rank: in blocks, each with sets of one size. A block is
// a layer; with HeadBudgets::kAdaptive it is one KV head of a layer, and looks to the
// backend like a layer of one KV head.
struct BlockLayout {
  KvShape shape;   // of a block
  SetLayout sets;  // likewise
  int per_layer = 1;
  bool divided = false;  // by scores, among KV heads

  int num_blocks() const { return shape.num_layers * per_layer; }
  int LayerOf(int block) const { return block / per_layer; }
  int BlockOf(int layer, int kv_head) const { return layer * per_layer + (divided ? kv_head : 0); }
};
BlockLayout BlocksOf(const RankCacheOptions& options, const PolicyOptions& policy);
// What a layer of a prompt reduces: with HeadBudgets::kAdaptive each head's scores, for
// the choice of how many slots each head gets.
SetLayout PromptSetsOf(const RankCacheOptions& options, const PolicyOptions& policy);
// INVALID_ARGUMENT where ranks share KV heads: of the others' sets each knows no sizes.
absl::Status CheckHeadBudgets(const RankCacheOptions& options, const PolicyOptions& policy);
// Positions that no KV head competes for at the end of the prompt.
int64_t ProtectedAtPrompt(const Budget& budget);

// Of each block.
struct BlockSizes {
  std::vector<LayerBudget> budgets;  // [num_blocks]
  // [num_blocks] slots per set: what decode needs between two plans for bounded policies;
  // everything up to max_tokens, whole pages, for the others.
  std::vector<int64_t> capacities;

  // Of one block whose budget is known now.
  void Set(int block, const LayerBudget& budget, const RankCacheOptions& options,
           const SequenceOptions& sequence);
};
// When the sequence opens. Where scores will decide how many slots a head gets, the most
// that the heads of this rank can get.
BlockSizes LargestSizes(const RankCacheOptions& options, const Budget& budget,
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
                      const BlockSizes& sizes);

// Hidden states of all of a prompt's tokens: held while it runs, beside the limit.
int64_t PromptHiddenBytes(int64_t prompt_tokens, int hidden_size);

// Fields that an item has in a step's agreement, and those of the step itself.
inline constexpr int kStepFields = 2;
inline constexpr int kItemFields = 6;
inline constexpr int kPromptFields = 3;

}  // namespace heavywater
