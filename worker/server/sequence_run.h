// One sequence while it runs: where its prompt stands, which token comes next,
// what the client is told. Rank 0 only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "heavywater/v1/generation.pb.h"
#include "heavywater/v1/step.pb.h"
#include "worker/model/sampler.h"
#include "worker/model/streaming_decoder.h"
#include "worker/rank/sequence_options.h"
#include "worker/server/command_runner.h"
#include "worker/server/served_generation.h"

namespace heavywater {

// log softmax(logits)[token], to single precision.
double LogProbability(std::span<const float> logits, int32_t token);

// Used by the thread of the step.
class SequenceRun {
 public:
  static absl::StatusOr<std::unique_ptr<SequenceRun>> Create(
      std::shared_ptr<ServedGeneration> generation, const Tokenizer& tokenizer);

  SequenceId id() const { return generation_->sequence; }
  const GenerationRequest& request() const { return generation_->request; }
  ResponseQueue& responses() { return generation_->responses; }
  const ResponseQueue& responses() const { return generation_->responses; }
  const std::string& trace() const { return generation_->trace; }
  absl::Status cancelled_status() const { return generation_->CancelledStatus(); }

  // Of a restored sequence: its state has seen so many tokens; those that follow are
  // taken in again.
  absl::Status StartAt(int64_t tokens_seen);
  int64_t restored_tokens() const { return generation_->opened.tokens_seen; }
  // Where the last state was reported from which it could be restored.
  int64_t snapshot_tokens() const { return snapshot_tokens_; }
  void NoteSnapshot() { snapshot_tokens_ = tokens_seen_; }

  // The prompt, chunk by chunk through each layer. Prompts with the same number other
  // than 0 go through the layers together.
  bool prompt_done() const { return prompt_done_; }
  uint64_t prompt_batch() const { return prompt_batch_; }
  void set_prompt_batch(uint64_t batch) { prompt_batch_ = batch; }
  int64_t prompt_tokens() const { return request().sequence.prompt_tokens; }
  // Of them: in stored pages. Chunks begin behind them.
  int64_t stored_tokens() const { return generation_->opened.prefix_tokens; }
  int layer() const { return layer_; }
  int64_t chunk_begin() const { return chunk_begin_; }
  void ChunkDone(int64_t chunk_tokens, int num_layers, absl::Duration took);

  // Whether the suffix, appended after the prompt, is not all taken in yet: no
  // token is chosen until it is.
  bool appending() const { return suffix_taken_ < request().suffix.size(); }
  // What the next step takes in, at tokens_seen: the next part of the suffix, at
  // most `limit` (>= 1) tokens of it, or the token chosen last.
  std::span<const int32_t> NextTokens(int64_t limit) const;
  int64_t tokens_seen() const { return tokens_seen_; }
  void TokensTaken(int64_t count, absl::Duration took);

  // How often each position was read in place by tokens taken: told with the next
  // token.
  void AddReads(std::span<const int64_t> reads);

  // Chooses the next token from the distribution that follows the tokens seen
  // (or takes the forced one) and tells the client, unless it has that one already.
  absl::Status TakeLogits(std::span<const float> logits, const SequenceStats& stats);
  bool finished() const { return !finish_reason_.empty(); }

  // Sums over the ranks, shown with every token until the next ones come.
  void set_figures(const SequenceFigures& figures) { figures_ = figures; }
  // The last message. `world_size`: ranks in the group;
  // `plan`: the last one reported.
  void SendSummary(const SequenceStats& stats, int world_size, int64_t plan);

 private:
  SequenceRun(std::shared_ptr<ServedGeneration> generation, const Tokenizer& tokenizer,
              Sampler sampler);
  absl::Status ChooseToken(std::span<const float> logits);
  int64_t AppendTokens() const;
  std::string WhyNotReused() const;
  void NoteFinish();
  void Send(std::span<const float> logits, const std::string& text, const SequenceStats& stats);

  const std::shared_ptr<ServedGeneration> generation_;
  const Tokenizer& tokenizer_;
  Sampler sampler_;
  StreamingDecoder decoder_;
  uint64_t prompt_batch_ = 0;
  int layer_ = 0;
  int64_t chunk_begin_ = 0;
  bool prompt_done_ = false;
  int64_t tokens_seen_ = 0;
  int64_t snapshot_tokens_ = 0;
  size_t suffix_taken_ = 0;
  int32_t next_token_ = 0;
  int new_tokens_ = 0;
  std::string finish_reason_;  // empty: goes on
  SequenceFigures figures_;
  std::vector<int64_t> reads_;  // since the last token chosen, by position
  absl::Duration prompt_time_;
  absl::Duration suffix_time_;
  absl::Time first_token_time_;
  absl::Time last_token_time_;
};

}  // namespace heavywater
