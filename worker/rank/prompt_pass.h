// The exact prompt of one sequence: every query attends to all positions before
// it; each layer is compressed to its budget before the next one starts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/device_memory.h"
#include "worker/comm/communicator.h"
#include "worker/rank/model.h"
#include "worker/rank/prompt_attention.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// Runs in pieces, so that other sequences' steps run in between:
//
//   while (!pass.done()) {
//     while (!pass.layer_complete()) pass.RunChunk();      // collectives of the model only
//     communicator.AllReduceSum(pass.reduce_buffer(), stream);
//     pass.LayerAfter();
//   }
//   pass.ComputeLogits();
//
// Every rank makes the same calls. A rank that fails tells the others in the
// next reduce, so that all of them fail; the sequence must then be closed.
class PromptPass {
 public:
  // `tokens`: as many as the sequence was opened for; copied. `cache` and
  // `model` outlive the pass, which must be destroyed before its sequence is
  // closed. INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION (prompt has run).
  static absl::StatusOr<std::unique_ptr<PromptPass>> Create(RankCache& cache, Model& model,
                                                            SequenceId sequence,
                                                            std::vector<int32_t> tokens);
  ~PromptPass();

  int layer() const { return attention_->layer(); }  // the one being computed
  bool layer_complete() const { return chunk_begin_ == num_tokens(); }
  // Of the prompt's first tokens, those that are not computed (SequenceOptions::stored_tokens):
  // each layer takes their K and V from the host pages.
  int64_t stored_tokens() const { return stored_tokens_; }
  bool done() const { return attention_->done(); }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  SequenceId sequence() const { return attention_->sequence(); }

  // The next max_step_tokens through this layer, written to the host pages. An
  // error here ends the group (the model's collectives); anything of this rank
  // alone is kept for the reduce.
  absl::Status RunChunk();
  // All of one layer of several prompts, each of one chunk, that lie side by side in the
  // model's products and attend each by itself: prompts of which one alone would not
  // fill a chunk share what a chunk costs beyond its tokens. All on one cache and model,
  // at the same layer, with no chunk of it run and nothing stored; together at most
  // max_step_tokens. Then
  // each has the layer complete. Errors as RunChunk().
  static absl::Status RunLayerTogether(std::span<PromptPass* const> passes);
  // All remaining chunks of the layer.
  absl::Status LayerBefore();
  // Scores of the complete layer and the ranks' agreement; sum it over ranks.
  DeviceSpan<int64_t> reduce_buffer();
  // Vote, select, move the kept rows to the sequence's slots. FAILED_PRECONDITION
  // naming both values when ranks disagree, or the failing rank's code.
  absl::Status LayerAfter();

  // Once done: logits [1][vocab_size] of the last position, a collective.
  // Valid until the cache's next step or chunk.
  absl::StatusOr<DeviceSpan<const float>> ComputeLogits();

  // All of the above, the reduces over `communicator`.
  absl::StatusOr<DeviceSpan<const float>> Run(Communicator& communicator);

 private:
  PromptPass(RankCache& cache, Model& model, std::vector<int32_t> tokens)
      : cache_(cache), model_(model), tokens_(std::move(tokens)) {}
  absl::Status Allocate(SequenceId sequence);
  absl::Status Embed(Position first, int64_t count);
  absl::Status ChunkThroughLayer(Position first, int64_t count);
  DeviceSpan<float> Hidden(int64_t first, int64_t count) const;
  static absl::Status EmbedTogether(std::span<PromptPass* const> passes, DeviceSpan<float> hidden);
  static void AttendTogether(std::span<PromptPass* const> passes, int64_t total);

  RankCache& cache_;
  Model& model_;
  const std::vector<int32_t> tokens_;
  int64_t stored_tokens_ = 0;
  int64_t chunk_begin_ = 0;
  DeviceBuffer hidden_;  // [num_tokens - stored_tokens][hidden_size]
  std::unique_ptr<PromptAttention> attention_;
};

}  // namespace heavywater
