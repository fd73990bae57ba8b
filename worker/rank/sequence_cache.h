// One sequence on one rank: its slots, its host pages, its counters.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/cache/layer_storage.h"
#include "worker/rank/cache_places.h"
#include "worker/rank/host_pages.h"
#include "worker/rank/pivotal_history.h"
#include "worker/rank/plan_hash.h"
#include "worker/rank/plan_report.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/sequence_options.h"
#include "worker/rank/sequence_recall.h"
#include "worker/rank/sequence_snapshot.h"

namespace heavywater {

// Slots lie in blocks (BlockLayout): a layer's, or with adaptive budgets a KV head's.
// Every set of a block holds the same number of positions and has the same `used`: all
// gain and lose by the same counts. Blocks differ where their budgets do.
class SequenceCache {
 public:
  // Reserves device memory and the prompt's host pages; allocates nothing yet.
  static absl::StatusOr<std::unique_ptr<SequenceCache>> Create(const RankCacheOptions& options,
                                                               SequenceId id,
                                                               const SequenceOptions& sequence,
                                                               DeviceMemory& memory, Stream& stream,
                                                               HostTier* tier);

  SequenceId id() const { return id_; }
  const SequenceOptions& options() const { return options_; }
  const Budget& budget() const { return budget_; }
  const BlockLayout& blocks() const { return blocks_; }
  const LayerBudget& BudgetOf(int block) const { return sizes_.budgets[block]; }
  HostPages& host_pages() { return host_pages_; }
  const HostPages& host_pages() const { return host_pages_; }
  SequenceRecall* recall() { return recall_.get(); }    // null: off
  PivotalHistory* history() { return history_.get(); }  // null: scores are not counts
  // Null: K lies in its slots as attention wants it (Positions::kAbsolute).
  const CachePlaces* places() const { return places_.get(); }
  const PlanHash& hash() const { return hash_; }  // of the residents now
  int64_t tokens_seen() const { return tokens_seen_; }
  // Of each block, slots per set.
  std::vector<int64_t> used() const { return used_after(0); }
  std::vector<int64_t> used_after(int64_t num_tokens) const;
  // Whether `num_tokens` more fit into every block as it is.
  bool Fits(int64_t num_tokens) const;
  int64_t total_used() const;      // over layers, slots per set, as even budgets have them
  int64_t total_capacity() const;  // over blocks, slots per set
  // Whether a set of some block holds more than its budget.
  bool OverBudget() const;
  int64_t tokens_resident() const;  // per set, mean over layers and the model's heads
  int64_t queries_since_plan() const { return queries_since_plan_; }
  bool prompt_done() const { return prompt_done_; }
  // The prompt's first query whose attention counts: 0, or where the window begins.
  int64_t first_scored_query() const;
  LayerView View(int block) const { return storage_[block].View(blocks_.shape); }
  const SlotTable& table(int block, int set) const { return storage_[block].table(set); }
  const LayerStorage& storage(int block) const { return storage_[block]; }
  bool PlanDue(int64_t num_tokens) const;

  // FAILED_PRECONDITION when a prompt has begun already.
  absl::Status BeginPrompt();
  // The prompt: blocks in order, each from its whole KV (GatherSlots's arguments).
  // `demoted_scores`: the seeds once more, in host memory, for recall's ledger.
  absl::Status AddPromptBlock(const LayerView& whole, std::span<const Position> kept,
                              DeviceSpan<const int64_t> seeds,
                              std::span<const int64_t> demoted_scores);
  // Before the block is added: scores have decided how much it may hold.
  void SetBudget(int block, const LayerBudget& budget);
  // After the last layer: publishes the host pages, gives up the prompt's
  // reservation.
  void FinishPrompt();
  // The sequence cannot go on: every later append fails with `status`.
  void Break(const absl::Status& status) { broken_ = status; }

  // An append in three parts. Checks that `num_tokens` can be appended at
  // `first_position` and makes room for them; tables do not change.
  // FAILED_PRECONDITION, INVALID_ARGUMENT, OUT_OF_RANGE, RESOURCE_EXHAUSTED. A sequence that is
  // broken here has room, too: ranks agree on what they reduce by whether tokens fit.
  absl::Status PrepareAppend(Position first_position, int64_t num_tokens);
  // Slots of one layer for the prepared tokens, [num_sets][num_tokens], its blocks in order.
  void TakeSlots(int layer, int64_t num_tokens, std::vector<int32_t>& slots);
  // All layers have their rows, in `slots` [num_layers][num_sets][num_tokens]: the
  // tokens count as seen.
  void CommitAppend(int64_t num_tokens, std::span<const int32_t> slots);
  // Or the other way: as before PrepareAppend(), except that gains since the
  // last plan are lost. `slots`: of the layers that took some; `used_before`:
  // used() before they did.
  absl::Status UndoAppend(int64_t num_tokens, std::span<const int64_t> used_before,
                          std::span<const int32_t> slots);

  // Frees occupied slots of one set.
  absl::Status ReleaseVictims(int block, int set, std::span<const int32_t> victims);
  // Scores of the residents, [num_sets][capacity], in host memory.
  absl::StatusOr<std::vector<int64_t>> ReadScores(int block) const;
  // Demoted positions get slots of one set again, with these scores; those of a sequence that is
  // broken stay empty, so that slots and hash are as on the other ranks.
  absl::Status Promote(int layer, int set, std::span<const Position> positions,
                       std::span<const int64_t> scores);
  // After every set has released its victims.
  absl::Status FinishPlan();

  // An append that needed more slots than planned has reserved memory that is
  // not needed any longer. Given up when the step has ended, since its buffers
  // count on it.
  bool has_excess_reservation() const;
  void GiveUpExcessReservation();

  // Whether Snapshot() can be restored to exactly this state: at a plan (or wherever
  // nothing is pending until one), all of it in host memory.
  bool CanSnapshot() const;
  // FAILED_PRECONDITION unless CanSnapshot(). Without slots (and the ledger's scores)
  // where another rank holds the same.
  absl::StatusOr<SequenceSnapshot> Snapshot(bool with_slots) const;
  // Instead of the prompt, for options().restored_tokens: the slots are filled from the
  // host pages. Positions below `known_tokens` of the text come again as they were, so
  // that what the pages hold of them is not written anew. DATA_LOSS: the snapshot does
  // not fit, or pages are not there; the sequence is then good for nothing.
  absl::Status Restore(const SequenceSnapshot& snapshot, int64_t known_tokens);

  // Instead of the prompt, for options().restored_tokens: the other's state between two
  // steps, bit for bit. Its options are the same; its device work is done.
  absl::Status CopyFrom(const SequenceCache& from);
  // The state between two steps as bytes, for another process (of the same build); with recall
  // the host pages are needed beside it. FAILED_PRECONDITION: before the prompt's end; policies
  // whose state cannot be saved (scissorhands, adaptive head budgets); with recall, pages that
  // found no room in host memory.
  absl::StatusOr<std::vector<std::byte>> SaveState() const;
  // Instead of the prompt, for options().restored_tokens, where the options are those of the
  // one that was saved. `pages`: with recall, of all tokens (HostPages::ReadPage()). DATA_LOSS:
  // the bytes do not fit; the sequence is then good for nothing.
  absl::Status LoadState(std::span<const std::byte> state,
                         std::span<const std::span<const std::byte>> pages);
  // As if the tokens from `tokens` on had never come. OUT_OF_RANGE; FAILED_PRECONDITION
  // where the policy forgets, since later queries are then in the scores of earlier tokens.
  absl::Status Truncate(int64_t tokens);

  SequenceStats Stats() const;
  absl::StatusOr<PlanReport> Report(bool with_sets) const;
  absl::StatusOr<std::vector<std::byte>> ReadResident(int layer, int kv_head,
                                                      Position position) const;
  // Resident or demoted, as RankCache::ReadKv().
  absl::StatusOr<std::vector<std::byte>> ReadKv(int layer, int kv_head, Position position) const;
  // Device bytes beyond the layers' own that are held at this moment.
  void NoteBytes(int64_t more_bytes);

 private:
  SequenceCache(const RankCacheOptions& rank, SequenceId id, const SequenceOptions& options,
                DeviceMemory& memory, Stream& stream);
  absl::Status CheckPlacesLeft(int64_t num_tokens) const;
  absl::Status EnsureCapacity(int64_t num_tokens);
  int64_t BlockBytes(int64_t capacity) const;
  bool WithinPlannedCapacity() const;
  absl::Status ShrinkToPlannedCapacity();
  absl::StatusOr<ResidentSet> ReadSet(int block, int set, std::span<const int64_t> scores) const;
  int64_t LargestDropped(std::span<const PositionRange> unbacked) const;
  int64_t device_bytes() const;
  int64_t planned_bytes() const;
  void AddBlockHash(int block);
  int64_t ExtraSlots(int layer) const;
  std::span<const SlotSnapshot> SetsOf(const SequenceSnapshot& snapshot, int block) const;
  std::vector<const std::byte*> PagesOf(int block) const;
  absl::Status CheckSnapshot(const SequenceSnapshot& snapshot);
  absl::Status TakeBudgets(const SequenceSnapshot& snapshot);
  absl::Status CheckBlock(int block, std::span<const SlotSnapshot> sets, int64_t tokens_seen) const;
  absl::Status LoadBlock(int block, StateReader& in, std::vector<SlotSnapshot>& slots);
  absl::Status RestoreBlock(int block, std::span<const SlotSnapshot> sets);
  int ModelHead(int block, int set) const;  // -1: all heads share the set

  const RankCacheOptions rank_;
  const SequenceId id_;
  const SequenceOptions options_;
  DeviceMemory& memory_;
  Stream& stream_;
  Budget budget_;
  const BlockLayout blocks_;
  BlockSizes sizes_;  // as planned
  DeviceMemory::Reservation reservation_;
  HostPages host_pages_;
  std::unique_ptr<SequenceRecall> recall_;
  std::unique_ptr<PivotalHistory> history_;
  std::unique_ptr<CachePlaces> places_;
  std::vector<LayerStorage> storage_;  // [num_blocks]
  bool prompt_begun_ = false;
  bool prompt_done_ = false;
  absl::Status broken_;
  int64_t tokens_seen_ = 0;
  int64_t queries_since_plan_ = 0;
  int64_t plans_ = 0;
  PlanHash hash_;
  int64_t peak_bytes_ = 0;
  int64_t peak_bytes_after_prompt_ = 0;
};

}  // namespace heavywater
