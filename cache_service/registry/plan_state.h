// What the ranks have reported about one sequence's plans, and which plan is
// committed: the last one that all ranks reported alike, whose tokens each rank
// has brought to the host tier or given up, and whose sets are known.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "cache_service/registry/token_ranges.h"
#include "heavywater/v1/cache_state.pb.h"
#include "heavywater/v1/group.pb.h"

namespace heavywater {

struct PlanLayout {
  SequenceId sequence = 0;
  int num_ranks = 1;
  int num_layers = 1;
  int num_kv_heads = 1;
  bool per_kv_head = false;  // scope kv_head: a set for every head, hashes differ by rank
  int64_t max_tokens = 1;
  // Counts the bytes of all committed states that are kept, of several sequences that share one
  // once; null: nobody counts.
  std::shared_ptr<std::atomic<int64_t>> snapshot_gauge = nullptr;
};

// One layer's set, or one KV head's of one layer.
struct ResidentPositions {
  std::vector<int32_t> positions;  // ascending
  std::vector<int64_t> scores;     // [positions] 2^-32 fixed point
  int rank = 0;                    // that reported it
  size_t num_positions = 0;        // in the whole set; they may come in parts

  bool whole() const { return positions.size() == num_positions; }
};

// A committed state from which a sequence can go on: a part of every rank.
struct CommittedSnapshot {
  int64_t plan = 0;
  int64_t tokens_seen = 0;
  std::vector<std::string> parts = {};  // [num_ranks]
  uint64_t order = 0;                   // as given to Advance() when it was taken
  int64_t bytes() const;
};

struct ReportedPlan {
  int64_t number = 0;
  int64_t tokens_seen = 0;
  uint64_t hash = 0;
  int first_rank = 0;                                     // whose report came first
  std::vector<bool> reported;                             // [num_ranks]
  std::vector<TokenRanges> dropped;                       // [num_ranks] as of this plan
  size_t bytes = 0;                                       // of its sets and snapshots
  std::vector<std::string> snapshots;                     // [num_ranks] as far as they have come
  std::vector<size_t> snapshot_bytes;                     // [num_ranks] of the whole; 0: none
  std::map<std::pair<int, int>, ResidentPositions> sets;  // by layer and kv_head (or -1)
};

// What its sets and snapshots take.
size_t BytesOf(const ReportedPlan& plan);

// Not thread safe.
class PlanState {
 public:
  explicit PlanState(const PlanLayout& layout);

  // INVALID_ARGUMENT naming the field; nothing is changed either way.
  absl::Status Validate(int rank, const v1::PlanReport& report) const;

  // Takes a valid report. One whose plan lies before the rank's last is a replay
  // and ignored; one of the same plan adds the sets that an earlier part of the
  // report lacked.
  void Apply(int rank, const v1::PlanReport& report);

  // Moves the committed plan on. `watermark(rank)`: positions below are in the
  // host tier, as the tier knows it; none for a rank that writes no pages there:
  // what it reported counts.
  // `order`: marks the snapshots taken now, for whoever compares their age.
  using Watermarks = std::function<std::optional<int64_t>(int rank)>;
  void Advance(const Watermarks& watermark, uint64_t order = 0);

  // Null before the first.
  std::shared_ptr<const ReportedPlan> committed() const { return committed_; }
  // The newest committed state that has seen at most `max_tokens_seen`; the first (as a
  // rule of the prompt's end) and the last two are kept. Null: none.
  std::shared_ptr<const CommittedSnapshot> FindSnapshot(int64_t max_tokens_seen) const;
  // The state of that plan; null when it is not kept.
  std::shared_ptr<const CommittedSnapshot> SnapshotOfPlan(int64_t plan) const;
  // Null: none.
  std::shared_ptr<const CommittedSnapshot> oldest_snapshot() const;
  void DropOldestSnapshot();
  // The ranks go on from the state of `plan` with the first `num_tokens` tokens, and
  // report again what came after it: nothing is committed until then if the committed
  // plan came after it.
  void GoBackTo(int64_t plan, int64_t num_tokens);
  // What came after the first `num_tokens` tokens is forgotten; nobody goes on from there
  // yet. `plan`: of the newest state that is left.
  void Truncate(int64_t plan, int64_t num_tokens);
  // The first position that some rank has reported as given up, of plans not gone back
  // behind; the largest number: none.
  int64_t first_dropped() const;
  // The rank has said that it writes no more.
  bool is_finished(int rank) const { return ranks_[static_cast<size_t>(rank)].finished; }
  // Positions up to so many tokens may come.
  void Extend(int64_t max_tokens) { layout_.max_tokens = std::max(layout_.max_tokens, max_tokens); }
  // FAILED_PRECONDITION naming both values once ranks have disagreed; no plan is
  // committed from then on.
  const absl::Status& agreement() const { return agreement_; }
  // The same state of another sequence: what is committed, and the tokens. Its ranks have
  // finished.
  PlanState ForkedAs(SequenceId sequence) const;
  // --- What a restart needs --- (plan_state_record.cc)
  // All of it; without sets and reports under way where they exceed kMaxRecordBytes,
  // which then come again with the next plans.
  v1::PlansState ToRecord() const;
  // Of a new state. DATA_LOSS: it is not one of this layout.
  absl::Status Load(const v1::PlansState& record);

  bool finished(int rank) const { return ranks_[rank].finished; }
  bool all_finished() const;
  // Token ids from position 0 on, as far as reported without a gap.
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  struct Rank {
    int64_t last_plan = 0;
    int64_t watermark = 0;  // as reported
    bool finished = false;
  };

  absl::Status ValidateSet(const v1::ReportedSet& set, int64_t tokens_seen) const;
  void AddTokens(const v1::PlanReport& report);
  void BoundPending();
  void CheckAgreement(const ReportedPlan& plan, int rank, const v1::PlanReport& report);
  void AddSnapshot(int rank, const v1::SnapshotPart& part, ReportedPlan& plan) const;
  bool IsRestorable(const ReportedPlan& plan) const;
  void TakeSnapshots(const std::vector<int64_t>& watermarks, uint64_t order);
  void KeepSnapshot(CommittedSnapshot snapshot);
  bool IsComplete(const ReportedPlan& plan) const;
  // `watermarks`: of each rank.
  static bool IsStored(const ReportedPlan& plan, const std::vector<int64_t>& watermarks);

  PlanLayout layout_;
  std::vector<Rank> ranks_;
  std::map<int64_t, ReportedPlan> pending_;  // by number, above the committed one
  std::shared_ptr<const ReportedPlan> committed_;
  std::deque<std::shared_ptr<const CommittedSnapshot>> snapshots_;  // ascending
  absl::Status agreement_;
  std::vector<int32_t> tokens_;
};

}  // namespace heavywater
