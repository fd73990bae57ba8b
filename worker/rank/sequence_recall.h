// Recall of one sequence on one rank: the sketches of its keys, which positions
// are demoted in each layer and set, and what they have received.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/rank/demoted_ledger.h"
#include "worker/rank/host_pages.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/recall_region.h"
#include "worker/rank/recall_stats.h"
#include "worker/rank/resting_pages.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/sequence_options.h"
#include "worker/rank/sequence_snapshot.h"

namespace heavywater {

class StateReader;
class StateWriter;

// A demoted position that a plan may promote, with its score.
struct PromotionCandidate {
  Position position = 0;
  int64_t score = 0;
};

// Sketches exist from the first demotion on (sketched()): until then queries are
// observed, so that they can choose the channels. They are coded at plans: pages
// that have filled, and the open page every kSketchBlock positions, or sooner when
// a position without a code is no longer recent and could be demoted.
class SequenceRecall {
 public:
  // Within the sequence's reservation (RecallBytesOf). All of them outlive it.
  static absl::StatusOr<std::unique_ptr<SequenceRecall>> Create(
      const RankCacheOptions& rank, const SequenceOptions& sequence, const Budget& budget,
      DeviceMemory& memory, Stream& stream, const HostPages& pages);

  bool sketched() const { return sketched_tokens_ > 0; }
  int64_t device_bytes() const;

  // Queries [rows of num_tokens] of a layer at first_position, while nothing is
  // sketched.
  absl::Status Observe(int layer, DeviceSpan<const float> queries, int64_t num_tokens,
                       Position first_position);

  // The end of a prompt's layer: kept [num_sets][kept_per_set] ascending, scores
  // [num_sets][prompt_tokens] of all (or empty: none). Layers in order.
  absl::Status AddPromptLayer(int layer, std::span<const Position> kept,
                              std::span<const int64_t> scores);

  // A step's queries: `num_tokens` of this sequence. `sample_missing`: estimate
  // the attention that is missing, as some steps do anyway; `note_reads`: remember what is picked
  // (a list for each query: 4 recall_tokens bytes of host memory).
  void BeginStep(int64_t num_tokens, bool sample_missing, bool note_reads);
  // What a layer's queries may pick from; null: nothing. Valid until the step ends.
  const RecallView* View(int layer) const;
  void CommitStep();
  // Of the last step, if it noted them and has been committed: by how many of its
  // queries (tokens x own KV heads x layers) each position was read in place. By
  // position, as far as positions are in the sketch; else empty.
  std::span<const int64_t> reads() const { return reads_; }
  // Of the same step: its queries (0: none noted), and what one of them has picked in
  // a layer and own KV head, ascending. Mode `all` keeps no lists: empty.
  int64_t noted_tokens() const { return reads_.empty() ? 0 : step_tokens_; }
  std::span<const Position> picks(int layer, int64_t token, int head) const;
  // --- Steps that wait for pages that rest --- (sequence_recall_wait.cc)
  // Whether the layer's picks may fall on pages that rest and are to wait for them. Then, before
  // the layer's attention: the same with LookAhead(), which changes nothing, AskForMissed() of
  // all sequences, and AwaitAsked() of each: until each page is there or lost, or it is too late.
  bool MayWait(int layer) const;
  const RecallView* LookAhead(int layer);
  void AskForMissed(int layer);
  // `spared_layer`: pages of the others may rest meanwhile, where room is wanted; -1: none may.
  // Takes what it waits from `left`, which all sequences of a step share.
  void AwaitAsked(int spared_layer, absl::Duration& left);
  // A plan has chosen these of TakeReports(): the same for what is copied up. Then HasCopies()
  // says which can be: all the rank's heads of the set have the position in host memory.
  void AskForPromoted(int layer, int set, std::span<const Position> positions);
  bool HasCopies(int layer, int set, Position position) const;

  // The step failed: gains since the last plan are lost.
  void UndoStep();

  // A plan. Before the reduce (device work done): this rank's mass and proposals, and which
  // pages it could not copy up.
  void FillRegion(const RecallRegion& region, std::span<int64_t> buffer) const;
  // After it. `queries`: since the last plan; `evicts`: something will be demoted.
  absl::Status BeginPlan(int64_t queries, int64_t tokens_seen, bool evicts);
  // Takes the reports of the heads that share a set into its scores; returns
  // those that may be promoted (below `promotable_end`), ascending positions.
  // FAILED_PRECONDITION for a report of a position that is not demoted.
  absl::StatusOr<std::vector<PromotionCandidate>> TakeReports(int layer, int set,
                                                              const RecallRegion& region,
                                                              std::span<const int64_t> buffer,
                                                              int64_t promotable_end);
  void Demote(int layer, int set, std::span<const Position> positions,
              std::span<const int64_t> scores);
  void Promote(int layer, int set, std::span<const Position> positions);
  HostPageTable HostTable(int layer) const;
  // After all sets: sketches what is new, shows the device what is demoted.
  absl::Status FinishPlan(int64_t tokens_seen);

  // At a plan, or before the first. `with_scores`: else another rank's are used.
  absl::StatusOr<RecallSnapshot> Snapshot(bool with_scores) const;
  // Of a fresh one: as it was. slots [num_layers][num_sets]: the residents.
  absl::Status Restore(const RecallSnapshot& snapshot, std::span<const SlotSnapshot> slots,
                       int64_t tokens_seen);

  // Of a fresh one, between steps: as the other is, which has the same options.
  absl::Status CopyFrom(const SequenceRecall& from);

  // Part of SequenceCache::SaveState() and LoadState(); gains since the last plan included.
  absl::Status SaveState(StateWriter& out) const;
  absl::Status LoadState(StateReader& in, std::span<const SlotSnapshot> slots, int64_t tokens_seen);

  // How many pages the plan's region tells of, alike on all ranks: 0 where none may rest.
  int64_t region_pages() const { return rests_ && num_sets_ == 1 ? num_pages() : 0; }
  // Whether a page of one of the rank's heads rests, or is lost.
  bool Rests(int layer, int head, int64_t page) const { return rest_.Rests(layer, head, page); }

  const RecallStats& stats() const { return stats_; }

 private:
  struct Layer {
    Layer(int num_sets, int num_heads) : ledger(num_sets, num_heads) {}

    std::vector<DeviceSpan<std::byte>> sketches;  // [num_pages], this layer's part
    std::vector<const std::byte*> host_pages;     // [num_kv_heads][num_pages]
    std::vector<uint16_t> demoted;                // [num_sets][words_per_set]
    DeviceBuffer demoted_on_device;
    bool changed = false;  // since the last upload
    DemotedLedger ledger;
  };

  SequenceRecall(const RankCacheOptions& rank, const SequenceOptions& sequence,
                 const Budget& budget, DeviceMemory& memory, Stream& stream,
                 const HostPages& pages);
  absl::Status AddPages(int64_t tokens);
  absl::Status EncodeLayer(int layer, int64_t first_page, int64_t tokens);
  absl::Status ChooseChannels(int layer, int64_t tokens);
  absl::Status Upload(int layer);
  absl::Status RestoreDevice(const RecallSnapshot& snapshot);
  void MarkAbsent(int layer, int set, const SlotSnapshot& slots, int64_t tokens);
  void CountReads();
  void CountAllDemoted();
  bool NeedsEncoding(int64_t tokens_seen) const;
  // --- Pages that rest --- (sequence_recall_rest.cc)
  void UpdateRest();
  void TakeReturns();
  void LetRest(bool planned);
  void LetColdestRest(int64_t bytes, int spared_layer);
  void NoteHeat();
  void AddHeat();
  bool HasCopy(const PageId& page) const;
  // Whether positions of the page cannot be copied up on this rank now.
  bool IsAbsent(int layer, int set, int64_t page) const;
  // Of a head's set, by page; empty: none.
  std::vector<uint8_t> AbsentPages(int layer, int head) const;
  void FillAbsent(const RecallRegion& region, std::span<int64_t> buffer) const;
  bool MayPromote(int layer, int set, Position position, const RecallRegion& region,
                  std::span<const int64_t> buffer) const;
  bool waits() const { return rests_ && options_.policy.recall.wait && late_.empty(); }
  void ForgetLate();
  void Want(const PageId& page, std::vector<PageId>& asks);
  void MarkDemoted(int layer, int set, Position position);
  bool IsDemoted(const Layer& layer, int set, Position position) const;
  int64_t words_per_set() const;
  int64_t num_pages() const { return static_cast<int64_t>(sketches_.size()); }
  DeviceSpan<float> Squares(int layer) const;
  DeviceSpan<uint8_t> Channels(int layer) const;

  const RankCacheOptions rank_;
  const SequenceOptions options_;
  const SketchShape sketch_;
  const int num_sets_;
  const int64_t recent_tokens_;  // the fewest of any layer
  const bool prompt_demotes_;    // in some layer
  DeviceMemory& memory_;
  Stream& stream_;
  const HostPages& host_pages_;
  DeviceBuffer squares_;                // [1 or num_layers][num_kv_heads][kSketchQueries][head_dim]
  bool squares_of_all_layers_ = false;  // a prompt that demotes nothing, or comes in steps
  DeviceBuffer channels_;               // [num_layers][num_kv_heads][channels]
  std::vector<DeviceBuffer> sketches_;  // [num_pages] of [num_layers][num_kv_heads][page_bytes]
  std::vector<Layer> layers_;
  int64_t sketched_tokens_ = 0;  // positions below it have a code, in every layer
  int64_t clock_ = 0;            // queries for which scores have decayed
  int64_t step_tokens_ = 0;
  int64_t steps_ = 0;  // that could pick
  bool step_can_pick_ = false;
  static constexpr int64_t kMaxPagesToRest = 1024;  // in one round
  const bool rests_;                                // pages may rest
  RestingPages rest_;                               // of the first num_pages()
  bool planned_ = false;                            // since the last round
  std::vector<PageId> awaited_;
  std::vector<PageId> late_;  // given up on: no waiting until they have come, or are lost
  RecallView ahead_;
  std::vector<int64_t> missed_ahead_;  // [num_kv_heads][num_pages]
  int64_t steps_since_rest_ = 0;
  std::vector<RecallView> views_;    // [num_layers]
  std::vector<int32_t> num_picks_;   // [num_layers][step_tokens][num_kv_heads]
  std::vector<int32_t> num_missed_;  // likewise, where pages rest
  std::vector<float> missing_;       // likewise, when sampled
  std::vector<Position> picks_;      // likewise, [max_picks] each, when noted
  std::vector<int64_t> reads_;       // [num_pages x page_tokens], when noted
  bool note_reads_ = false;
  RecallStats stats_;
};

}  // namespace heavywater
