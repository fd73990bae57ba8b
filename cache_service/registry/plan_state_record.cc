// A sequence's plans as a record, and back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/plan_state.h"

namespace heavywater {
namespace {

// A message has 2 GiB at most; sets of very long sequences come near it.
constexpr size_t kMaxRecordBytes = size_t{512} << 20;

v1::ResidentState RecordOf(const std::pair<int, int>& key, const ResidentPositions& resident) {
  v1::ResidentState record;
  record.set_layer(key.first);
  record.set_kv_head(key.second);
  record.set_rank(resident.rank);
  record.set_num_positions(static_cast<int64_t>(resident.num_positions));
  record.mutable_positions()->Add(resident.positions.begin(), resident.positions.end());
  record.mutable_scores()->Add(resident.scores.begin(), resident.scores.end());
  return record;
}

v1::PlanState RecordOf(const ReportedPlan& plan) {
  v1::PlanState record;
  record.set_number(plan.number);
  record.set_tokens_seen(plan.tokens_seen);
  record.set_hash(plan.hash);
  record.set_first_rank(plan.first_rank);
  for (size_t rank = 0; rank < plan.reported.size(); ++rank) {
    v1::PlanPartState& part = *record.add_parts();
    part.set_reported(plan.reported[rank]);
    AppendFlat(plan.dropped[rank], part.mutable_dropped_ranges());
    part.set_snapshot(plan.snapshots[rank]);
    part.set_snapshot_bytes(static_cast<int64_t>(plan.snapshot_bytes[rank]));
  }
  for (const auto& [key, resident] : plan.sets) *record.add_sets() = RecordOf(key, resident);
  return record;
}

bool LoadSet(const v1::ResidentState& record, int num_ranks, ReportedPlan* plan) {
  if (record.positions_size() != record.scores_size() || record.rank() < 0 ||
      record.rank() >= num_ranks || record.num_positions() < record.positions_size()) {
    return false;
  }
  ResidentPositions& resident = plan->sets[{record.layer(), record.kv_head()}];
  resident.positions.assign(record.positions().begin(), record.positions().end());
  resident.scores.assign(record.scores().begin(), record.scores().end());
  resident.rank = record.rank();
  resident.num_positions = static_cast<size_t>(record.num_positions());
  return true;
}

absl::StatusOr<ReportedPlan> PlanOf(const v1::PlanState& record, const PlanLayout& layout) {
  const absl::Status damaged = absl::DataLossError(absl::StrCat(
      "the state of sequence ", layout.sequence, ": plan ", record.number(), " is damaged"));
  if (record.parts_size() != layout.num_ranks) return damaged;
  ReportedPlan plan;
  plan.number = record.number();
  plan.tokens_seen = record.tokens_seen();
  plan.hash = record.hash();
  plan.first_rank = record.first_rank();
  for (const v1::PlanPartState& part : record.parts()) {
    if (!CheckFlatRanges("dropped_ranges", part.dropped_ranges(), layout.max_tokens).ok() ||
        part.snapshot_bytes() < 0) {
      return damaged;
    }
    plan.reported.push_back(part.reported());
    plan.dropped.push_back(FromFlat(part.dropped_ranges()));
    plan.snapshots.push_back(part.snapshot());
    plan.snapshot_bytes.push_back(static_cast<size_t>(part.snapshot_bytes()));
  }
  for (const v1::ResidentState& set : record.sets()) {
    if (!LoadSet(set, layout.num_ranks, &plan)) return damaged;
  }
  plan.bytes = BytesOf(plan);
  return plan;
}

}  // namespace

v1::PlansState PlanState::ToRecord() const {
  v1::PlansState record;
  for (const Rank& rank : ranks_) {
    v1::RankPlansState& state = *record.add_ranks();
    state.set_last_plan(rank.last_plan);
    state.set_watermark(rank.watermark);
    state.set_finished(rank.finished);
  }
  for (const auto& [number, plan] : pending_) *record.add_pending() = RecordOf(plan);
  if (committed_ != nullptr) *record.mutable_committed() = RecordOf(*committed_);
  for (const auto& snapshot : snapshots_) {
    v1::CommittedSnapshotState& state = *record.add_snapshots();
    state.set_plan(snapshot->plan);
    state.set_tokens_seen(snapshot->tokens_seen);
    for (const std::string& part : snapshot->parts) state.add_parts(part);
  }
  if (!agreement_.ok()) record.set_disagreement(std::string(agreement_.message()));
  record.mutable_tokens()->Add(tokens_.begin(), tokens_.end());
  if (record.ByteSizeLong() > kMaxRecordBytes) {
    record.clear_pending();
    record.clear_committed();
  }
  return record;
}

absl::Status PlanState::Load(const v1::PlansState& record) {
  if (record.ranks_size() != layout_.num_ranks) {
    return absl::DataLossError(absl::StrCat("the state of sequence ", layout_.sequence, " has ",
                                            record.ranks_size(), " ranks, want ",
                                            layout_.num_ranks));
  }
  for (int rank = 0; rank < layout_.num_ranks; ++rank) {
    const v1::RankPlansState& state = record.ranks(rank);
    ranks_[rank] = {state.last_plan(), state.watermark(), state.finished()};
  }
  for (const v1::PlanState& pending : record.pending()) {
    HW_ASSIGN_OR_RETURN(ReportedPlan plan, PlanOf(pending, layout_));
    pending_.emplace(plan.number, std::move(plan));
  }
  if (record.has_committed()) {
    HW_ASSIGN_OR_RETURN(ReportedPlan plan, PlanOf(record.committed(), layout_));
    committed_ = std::make_shared<const ReportedPlan>(std::move(plan));
  }
  for (const v1::CommittedSnapshotState& state : record.snapshots()) {
    if (state.parts_size() != layout_.num_ranks) {
      return absl::DataLossError(absl::StrCat("the state of sequence ", layout_.sequence,
                                              ": a snapshot has ", state.parts_size(), " parts"));
    }
    CommittedSnapshot snapshot = {.plan = state.plan(), .tokens_seen = state.tokens_seen()};
    snapshot.parts.assign(state.parts().begin(), state.parts().end());
    KeepSnapshot(std::move(snapshot));
  }
  if (!record.disagreement().empty()) {
    agreement_ = absl::FailedPreconditionError(record.disagreement());
  }
  tokens_.assign(record.tokens().begin(), record.tokens().end());
  return absl::OkStatus();
}

}  // namespace heavywater
