#include "worker/server/plan_reports.h"

#include <utility>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

void AddSet(const ResidentSet& set, v1::PlanReport& proto) {
  v1::ReportedSet& to = *proto.add_sets();
  to.set_layer(set.layer);
  to.set_kv_head(set.kv_head);
  to.mutable_positions()->Assign(set.positions.begin(), set.positions.end());
  to.mutable_scores()->Assign(set.scores.begin(), set.scores.end());
}

}  // namespace

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
  if (reporter_ == nullptr || cache_.options().rank != 0) return;
  Sequence& state = sequences_[sequence];
  if (state.tokens.empty()) state.first_token = first_position;
  state.tokens.insert(state.tokens.end(), tokens.begin(), tokens.end());
}

absl::StatusOr<int64_t> PlanReports::Report(SequenceId sequence, bool with_sets) {
  HW_ASSIGN_OR_RETURN(const PlanReport report,
                      cache_.Report(sequence, with_sets && reporter_ != nullptr));
  Sequence& state = sequences_[sequence];
  int64_t plan = report.plan_number + 1;
  if (plan <= state.last.plan() && report.tokens_seen > state.last.tokens_seen()) {
    plan = state.last.plan() + 1;
  }
  v1::PlanReport proto = PlanReportToProto(report, plan, cache_.options().rank);
  state.last = proto;
  state.last.clear_sets();
  if (reporter_ == nullptr) return plan;
  if (!state.tokens.empty()) {
    proto.set_first_token(state.first_token);
    proto.mutable_tokens()->Assign(state.tokens.begin(), state.tokens.end());
    state.tokens.clear();
  }
  reporter_->Push({std::move(proto), /*keep=*/with_sets});
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
  if (reporter_ == nullptr || last.plan() == 0) return [] {};
  last.set_finished(true);
  return [reporter = reporter_, last] { reporter->Push({last, /*keep=*/false}); };
}

}  // namespace heavywater
