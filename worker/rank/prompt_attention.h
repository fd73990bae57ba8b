// The cache's part of a prompt, without a model: what PromptPass runs around its
// model's layers, and what an engine with its own Q, K and V drives (AttentionEngine).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

class PromptLayer;

// Every layer gets the whole prompt, in chunks, and is then compressed:
//
//   AppendAndAttend(layer, chunk) ...
//   BeforeReduce();  sum reduce_buffer() over the ranks;  AfterReduce();
//
// Layers complete in order. Chunks of a later layer may come before the earlier
// ones are complete only where SequenceOptions::prompt_in_steps says so: the
// device then holds all layers whole. Every rank makes the same calls. A rank that
// fails tells the others in the next reduce, so that all of them fail; the
// sequence must then be closed.
class PromptAttention {
 public:
  // `cache` outlives this, which must be destroyed before its sequence is closed.
  // NOT_FOUND, FAILED_PRECONDITION (a prompt has begun).
  static absl::StatusOr<std::unique_ptr<PromptAttention>> Create(RankCache& cache,
                                                                 SequenceId sequence);
  ~PromptAttention();

  SequenceId sequence() const { return sequence_id_; }
  int64_t num_tokens() const;           // of the prompt
  int64_t stored_tokens() const;        // of them: in host pages, from the first on
  int layer() const { return layer_; }  // the next to complete
  bool done() const { return whole_ == nullptr; }
  // Rows come unrotated (Positions::kCacheRelative).
  bool turns_rows() const;

  // Of a prompt with stored tokens, before the layer's first chunk: their K and V from the host
  // pages. Chunks begin behind them. Failures as below.
  void LoadStored(int layer);
  // Positions [first, first + count) of a layer, in order; written to the host
  // pages, too. What fails is kept for the reduce (status()), and the rows' out is
  // then anything.
  void AppendAndAttend(int layer, Position first, int64_t count, const AttentionRows& rows);

  // layer() has its last chunk: this rank's column sums and the ranks' agreement.
  absl::Status BeforeReduce();
  DeviceSpan<int64_t> reduce_buffer();
  // Vote, select, move the kept rows to the sequence's slots. FAILED_PRECONDITION
  // naming both values when ranks disagree, or the failing rank's code.
  absl::Status AfterReduce();

  // What this rank has failed with; the others learn of it in the next reduce.
  const absl::Status& status() const { return local_status_; }
  // The prompt cannot go on: every later append to the sequence fails with `reason`.
  void Break(const absl::Status& reason);

 private:
  PromptAttention(RankCache& cache, SequenceCache& sequence, SequenceId id);
  absl::Status CheckAgreement(std::span<const int64_t> entries);

  RankCache& cache_;
  SequenceCache& sequence_;
  const SequenceId sequence_id_;
  int layer_ = 0;
  absl::Status local_status_;
  std::unique_ptr<PromptLayer> whole_;  // null once done
};

}  // namespace heavywater
