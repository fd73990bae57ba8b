// Attention over a bounded cache for an engine that brings its own Q, K and V: the
// in-process API of the worker library. AttentionService is a shell around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/attention_step.h"
#include "worker/rank/plan_report.h"
#include "worker/rank/prompt_attention.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

enum class EnginePhase {
  kPrompt,      // a part of the prompt that is not its last
  kPromptLast,  // the prompt's last part, or all of it: each layer is compressed after it
  kDecode,      // after the prompt: one token, or several (a second turn)
};

// New tokens of one sequence in a step.
struct EngineItem {
  SequenceId sequence = 0;
  EnginePhase phase = EnginePhase::kDecode;
  Position first_position = 0;  // must be the number of tokens that the sequence has taken in
  int64_t num_tokens = 1;
  bool note_picks = false;  // DECODE: Kept() then lists what was read in place
};

// Rows of a step in one layer, in host memory, float32, this rank's heads.
struct HostRows {
  std::span<const float> queries;  // [rows][num_query_heads][head_dim], rotated
  std::span<const float> keys;     // [rows][num_kv_heads][head_dim], rotated
  std::span<const float> values;   // likewise
  std::span<float> out;            // like queries: what attention returns
};

// What one query of the last step has read in place.
struct QueryPicks {
  int layer = 0;
  int kv_head = 0;                  // over the whole model
  Position query = 0;               // its position
  std::vector<Position> positions;  // demoted ones, ascending
};

// A sequence after its last step.
struct KeptSequence {
  PlanReport report;              // with sets: positions and scores by layer and set
  std::vector<QueryPicks> picks;  // of queries that noted them; mode recall.all keeps no lists
};

// A sequence is opened, takes in its prompt and then tokens, in steps in which any
// number of sequences take part:
//
//   engine.Open(1, {.policy = policy, .prompt_tokens = 1000, .max_tokens = 2000});
//   engine.Begin(items);
//   for (int layer = 0; layer < num_layers; ++layer) engine.Attend(layer, rows);
//   engine.End();
//
// Attend() appends the layer's K and V, writes them through to host pages, and
// attends: a prompt's queries to all positions before them, later ones to the
// residents, to the earlier tokens of their append, and to what they recall. End()
// reduces scores over the ranks and plans. Where a prompt ends, each layer is
// reduced and compressed in Attend().
//
// Prompts. One kPromptLast item of the whole prompt goes through the layers once:
// the device holds one layer whole. Alone in its step it may be of any length: the
// layer's rows then come in parts, in several calls of Attend(). A prompt that goes
// through all layers part by part (kPrompt items) is opened with
// SequenceOptions::prompt_in_steps, and all layers stay whole until its end.
//
// Tensor parallel: each rank's engine drives its own rank, with its own heads, and
// all make the same calls in the same order: Open(), End() and a prompt's last
// Attend() of a layer are collectives.
//
// Errors. A call that is refused (INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION,
// OUT_OF_RANGE: the message names the field) changes nothing; the step goes on. An
// item that cannot run (no memory, host full, disagreeing ranks) has its status in
// item_status(), on every rank once the step has ended; its sequence is as before
// the step (a prompt's cannot go on) and the others go on. Any other error of
// Attend() or End() (the communicator's, the device's) ends the step: no sequence
// has advanced, prompts in it cannot go on.
//
// One thread at a time.
class AttentionEngine {
 public:
  // Both outlive the engine, and nothing else runs steps of the cache.
  AttentionEngine(RankCache& cache, Communicator& communicator);
  // Abandons the step; closes the sequences.
  ~AttentionEngine();

  // RankCache::Open() on every rank, or on none. A collective.
  absl::Status Open(SequenceId sequence, const SequenceOptions& options);
  // RankCache::Fork() on every rank, or on none: `source` of the engine `from` (it may be
  // this one) goes on as `sequence` here, too. A collective. FAILED_PRECONDITION while
  // `source` is in a step.
  absl::Status Fork(SequenceId sequence, AttentionEngine& from, SequenceId source);
  // RankCache::LoadState() on every rank, or on none, each with its own part. A collective.
  absl::Status LoadState(SequenceId sequence, const SequenceOptions& options,
                         std::span<const std::byte> state,
                         std::span<const std::span<const std::byte>> pages, int64_t tokens_seen);
  // Out of a step, of a sequence whose prompt has ended. NOT_FOUND; FAILED_PRECONDITION.
  absl::StatusOr<std::vector<std::byte>> SaveState(SequenceId sequence);
  // HostPages::ReadPage(). NOT_FOUND: no such sequence, or no copy of the page.
  absl::StatusOr<std::vector<std::byte>> ReadPage(SequenceId sequence, int64_t page);
  // SequenceCache::Truncate(), out of a step. Alike on every rank that is called alike.
  absl::Status Truncate(SequenceId sequence, int64_t tokens);
  // NOT_FOUND; FAILED_PRECONDITION while it is in the step.
  absl::Status Close(SequenceId sequence);
  absl::Status CheckNotInStep(SequenceId sequence) const;

  // A sequence at most once. All rows together at most max_step_tokens, except of a
  // prompt that is alone.
  absl::Status Begin(std::span<const EngineItem> items);
  // Layers in order. Rows are the items', in their order. Attend() trusts values on
  // the device; AttendHost() refuses NaN and infinity naming the array and the index, and
  // is FAILED_PRECONDITION where RankCacheOptions::brings_rows leaves it no room.
  absl::Status Attend(int layer, const AttentionRows& rows);
  absl::Status AttendHost(int layer, const HostRows& rows);
  absl::Status End();
  // Between Begin() and End(): as an error that ends the step. The other ranks wait
  // for this one until the communicator gives up, unless they do the same.
  void Abandon(const absl::Status& reason);

  bool in_step() const { return in_step_; }
  absl::Status CheckOutOfStep() const;  // FAILED_PRECONDITION within one
  // What the communicator has failed with: from then on nothing runs any more.
  const absl::Status& group_status() const { return group_status_; }
  uint64_t step() const { return step_number_; }  // the last one begun, from 1
  // Of the last step.
  std::span<const EngineItem> items() const { return items_; }
  std::span<const absl::Status> item_status() const { return item_status_; }
  bool planned(int item) const {
    return planned_[item];
  }  // it was due, and has run if all went well
  // Rows that the next Attend() may bring.
  int64_t rows_left() const { return num_rows_ - rows_done_; }

  // Between steps, of a sequence whose prompt has ended. NOT_FOUND, FAILED_PRECONDITION.
  absl::StatusOr<KeptSequence> Kept(SequenceId sequence);
  // K and then V of one position, as stored. `kv_head` counts over this rank's heads.
  // As RankCache::ReadKv(); FAILED_PRECONDITION within a step.
  absl::StatusOr<std::vector<std::byte>> ReadKv(SequenceId sequence, int layer, int kv_head,
                                                Position position);

  RankCache& cache() { return cache_; }

 private:
  struct Prompt {
    std::unique_ptr<PromptAttention> attention;
    int64_t tokens_appended = 0;  // in steps that have ended
    absl::Status failed;          // on every rank
  };

  absl::Status Reduce(DeviceSpan<int64_t> buffer);
  absl::Status Agree(SequenceId sequence, const absl::Status& opened);
  absl::Status OpenHere(SequenceId sequence, const SequenceOptions& options);
  absl::Status CheckItems(std::span<const EngineItem> items) const;
  absl::Status CheckItem(const EngineItem& item) const;
  absl::Status CheckPromptItem(const EngineItem& item, const Prompt& prompt) const;
  // How many rows the arrays of a layer have; INVALID_ARGUMENT naming the array.
  absl::StatusOr<int64_t> CheckRows(int layer, int64_t queries, int64_t keys, int64_t values,
                                    int64_t out) const;
  void BeginDecode(const std::vector<int64_t>& first_rows);
  absl::Status RunRows(int layer, const AttentionRows& rows, int64_t count);
  absl::Status RunPromptRows(size_t item, int layer, const AttentionRows& rows, int64_t count);
  absl::Status CompleteLayer();
  absl::Status CompressPrompt(size_t item);
  absl::Status EndDecode();
  void EndPrompts();
  void BreakPrompts(const absl::Status& reason);
  bool is_prompt(size_t item) const { return items_[item].phase != EnginePhase::kDecode; }

  RankCache& cache_;
  Communicator& communicator_;
  absl::Status group_status_;
  AttentionStep decode_;
  std::map<SequenceId, Prompt> prompts_;  // that have not ended

  bool in_step_ = false;
  uint64_t step_number_ = 0;
  std::vector<EngineItem> items_;
  std::vector<absl::Status> item_status_;
  std::vector<bool> planned_;
  std::vector<int64_t> first_rows_;
  std::vector<size_t> decode_items_;  // indices of those in decode_
  int64_t num_rows_ = 0;
  int64_t rows_done_ = 0;  // of next_layer_
  int next_layer_ = 0;
};

}  // namespace heavywater
