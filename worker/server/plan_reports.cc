#include "worker/server/plan_reports.h"

#include <utility>

#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "cache_service/runtime/logging.h"
#include "worker/rank/sequence_cache.h"
#include "worker/server/snapshot_proto.h"

namespace heavywater {
namespace {

// As group.proto says; a longer sequence is computed again after a failure.
constexpr size_t kMaxSnapshotBytes = size_t{64} << 20;

void AddSet(const ResidentSet& set, v1::PlanReport& proto) {
  v1::ReportedSet& to = *proto.add_sets();
  to.set_layer(set.layer);
  to.set_kv_head(set.kv_head);
  to.mutable_positions()->Assign(set.positions.begin(), set.positions.end());
  to.mutable_scores()->Assign(set.scores.begin(), set.scores.end());
}

std::function<void(QueuedReport)> PushTo(Reporter* reporter) {
  if (reporter == nullptr) return nullptr;
  return [reporter](QueuedReport report) { reporter->Push(std::move(report)); };
}

}  // namespace

PlanReports::PlanReports(RankCache& cache, Reporter* reporter)
    : cache_(cache), push_(PushTo(reporter)) {}

v1::PlanReport PlanReportToProto(const PlanReport& report, int64_t plan, int rank) {
  v1::PlanReport proto;
  proto.set_sequence_id(report.sequence);
  proto.set_plan(plan);
  proto.set_tokens_seen(report.tokens_seen);
  proto.set_hash(report.hash);
  proto.set_watermark(report.watermark);
  for (const PositionRange& range : report.unbacked) {
    proto.add_dropped_ranges(range.begin);
    proto.add_dropped_ranges(range.end);
  }
  if (report.scope == Scope::kLayer && rank != 0) return proto;
  for (const ResidentSet& set : report.sets) AddSet(set, proto);
  return proto;
}

void PlanReports::AddTokens(SequenceId sequence, int64_t first_position,
                            std::span<const int32_t> tokens) {
  if (push_ == nullptr || cache_.options().rank != 0) return;
  Sequence& state = sequences_[sequence];
  if (state.tokens.empty()) state.first_token = first_position;
  state.tokens.insert(state.tokens.end(), tokens.begin(), tokens.end());
}

// Ranks see alike whether a state can be given, except where host memory is full on
// some: then it is never complete at the registry.
void PlanReports::AddSnapshot(SequenceId sequence, v1::PlanReport& proto) const {
  const auto found = cache_.Find(sequence);
  if (!found.ok() || !(*found)->CanSnapshot()) return;
  const bool shared = (*found)->options().policy.scope == Scope::kLayer;
  const auto snapshot = (*found)->Snapshot(/*with_slots=*/!shared || cache_.options().rank == 0);
  if (!snapshot.ok()) {
    LogWarn("no snapshot", {{"sequence", sequence}, {"error", snapshot.status().ToString()}});
    return;
  }
  std::string bytes = SerializeSnapshot(*snapshot);
  if (bytes.size() > kMaxSnapshotBytes) return;
  proto.mutable_snapshot()->set_total_bytes(static_cast<int64_t>(bytes.size()));
  proto.mutable_snapshot()->set_data(std::move(bytes));
}

void PlanReports::Resume(SequenceId sequence, int64_t plan, int64_t tokens_seen,
                         int32_t incarnation) {
  Sequence& state = sequences_[sequence];
  state.last.set_sequence_id(sequence);
  state.last.set_plan(plan);
  state.last.set_tokens_seen(tokens_seen);
  state.last.set_incarnation(incarnation);
}

absl::StatusOr<int64_t> PlanReports::Report(SequenceId sequence, bool with_sets,
                                            bool with_snapshot) {
  const StepPhaseScope phase(StepPhase::kReport);
  HW_ASSIGN_OR_RETURN(const PlanReport report,
                      cache_.Report(sequence, with_sets && push_ != nullptr));
  Sequence& state = sequences_[sequence];
  int64_t plan = report.plan_number + 1;
  if (plan <= state.last.plan()) {
    plan = state.last.plan() + (report.tokens_seen > state.last.tokens_seen() ? 1 : 0);
  }
  v1::PlanReport proto = PlanReportToProto(report, plan, cache_.options().rank);
  proto.set_incarnation(state.last.incarnation());
  state.last = proto;
  state.last.clear_sets();
  if (push_ == nullptr) return plan;
  if (!state.tokens.empty()) {
    proto.set_first_token(state.first_token);
    proto.mutable_tokens()->Assign(state.tokens.begin(), state.tokens.end());
    state.tokens.clear();
  }
  if (with_snapshot) AddSnapshot(sequence, proto);
  const bool keep = with_sets || proto.has_snapshot();
  push_({std::move(proto), keep});
  return plan;
}

std::function<void()> PlanReports::Close(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  v1::PlanReport last;
  if (found != sequences_.end()) {
    last = std::move(found->second.last);
    sequences_.erase(found);
  }
  // A sequence that ended within its prompt was never reported.
  if (push_ == nullptr || last.plan() == 0) return [] {};
  last.set_finished(true);
  return [push = push_, last] { push({last, /*keep=*/false}); };
}

}  // namespace heavywater
