// Sequences that go on: after their ranks were lost, in a further turn, from an earlier token.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "tests/sim/system/system_simulation.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_snapshot.h"
#include "worker/server/policy_proto.h"
#include "worker/server/snapshot_proto.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxTokens = 220;

// As the scheduler has it: the state itself is gone or broken.
bool StateIsLost(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) || absl::IsDataLoss(status);
}

}  // namespace

// The client whose stream broke off asks again with what it has.
std::string SystemSimulation::Resume(Talk& talk) {
  if (talk.tokens_seen < talk.options.prompt_tokens || talk.text.size() < 2) {
    return ComputeAnew(talk);
  }
  world_.trace.Note("resume", talk.id);
  return Reopen(talk, talk.turn, /*cancelled=*/false);
}

// One that has ended goes on with more text, or from an earlier token on with other text.
std::string SystemSimulation::Turn(Talk& talk) {
  const auto had = static_cast<int64_t>(talk.text.size());
  if (had >= kMaxTokens || talk.tokens_seen < talk.options.prompt_tokens) {
    CloseAtService(talk);
    return "";
  }
  if (had > talk.options.prompt_tokens && world_.OneIn(3)) {
    ++talk.branch;
    talk.CutText(
        world_.Between(static_cast<int>(talk.options.prompt_tokens), static_cast<int>(had)));
  }
  const int more = world_.Between(1, 20);
  for (int i = 0; i < more; ++i) {
    talk.text.push_back(talk.TokenAt(static_cast<int64_t>(talk.text.size())));
  }
  talk.options.max_tokens = std::max(
      talk.options.max_tokens, static_cast<int64_t>(talk.text.size()) + world_.Between(1, 30));
  talk.turn = true;
  world_.trace.Note("turn", talk.id, talk.text.size());
  const bool cancelled = world_.OneIn(6);
  return Reopen(talk, /*turn=*/true, cancelled);
}

// `cancelled`: its client leaves before the ranks have heard of it.
std::string SystemSimulation::Reopen(Talk& talk, bool turn, bool cancelled) {
  v1::ReopenSequenceRequest request;
  request.set_sequence_id(talk.id);
  request.set_group(kSimGroup);
  request.set_epoch(rank_zero().link().epoch());
  *request.mutable_policy() = PolicyToProto(talk.options.policy);
  *request.mutable_budget() = BudgetToProto(talk.options.policy, talk.budget);
  request.set_prompt_tokens(talk.options.prompt_tokens);
  request.set_max_tokens(talk.options.max_tokens);
  request.set_tenant("tenant");
  request.set_max_tokens_seen(static_cast<int64_t>(talk.text.size()) - 1);
  request.set_extends(turn);
  request.mutable_tokens()->Assign(talk.text.begin(), talk.text.end());
  const absl::Time sent = world_.clock.Now();
  const auto known = world_.network.CallNow<v1::Sequence>(
      rank_zero().caller(), [&] { return service_.registry().sequences().Get(talk.id); });
  const auto reopened = world_.network.CallNow<v1::ReopenSequenceResponse>(
      rank_zero().caller(), [&] { return service_.registry().Reopen(request); });
  const absl::Status& status = reopened.status();
  if (!status.ok()) {
    world_.trace.Note(absl::StrCat("reopen: ", absl::StatusCodeToString(status.code())), talk.id);
    if (absl::IsUnavailable(status) || absl::IsAborted(status)) return "";  // it comes again
    if (absl::IsResourceExhausted(status) && turn) return "";
    if (absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) {
      return absl::StrCat("reopen: ", status.ToString());
    }
    if (absl::IsDataLoss(status)) CloseAtService(talk);
    return ComputeAnew(talk);
  }
  rank_zero().link().AddSequence(talk.id, sent);
  talk.lease = absl::Milliseconds(reopened->lease_ms());
  if (!cancelled) return Restore(talk, *reopened, turn);
  world_.trace.Note("turn cancelled before the ranks", talk.id);
  // As worker/server/generation_engine.cc: what a rank may still write to is not given back.
  if (known.ok() && known->finished()) GiveBack(talk, *reopened);
  rank_zero().link().RemoveSequence(talk.id);
  talk.where = Talk::Where::kEnded;
  talk.ForgetPlansAfter(reopened->plan());
  return "";
}

// As worker/server/sequence_client.h says.
void SystemSimulation::GiveBack(Talk& talk, const v1::ReopenSequenceResponse& reopened) {
  for (int rank = 0; rank < size(); ++rank) {
    v1::ReportPlanRequest request;
    request.set_group(kSimGroup);
    request.set_rank(rank);
    request.set_epoch(rank_zero().link().epoch());
    v1::PlanReport& report = *request.add_reports();
    report.set_sequence_id(talk.id);
    report.set_plan(reopened.plan());
    report.set_tokens_seen(reopened.tokens_seen());
    report.set_incarnation(reopened.incarnation());
    report.set_finished(true);
    const auto taken = world_.network.CallNow<v1::ReportPlanResponse>(
        rank_zero().caller(), [&] { return service_.registry().ReportPlan(request); });
    if (!taken.ok()) return;
  }
  if (world_.OneIn(2)) Suspend(talk);
}

absl::StatusOr<SequenceSnapshot> SystemSimulation::ReadPart(SequenceId id, int64_t plan, int rank,
                                                            int part) {
  v1::ReadSnapshotRequest request;
  request.set_sequence_id(id);
  request.set_plan(plan);
  request.set_rank(part);
  HW_ASSIGN_OR_RETURN(
      const v1::ReadSnapshotResponse response,
      world_.network.CallNow<v1::ReadSnapshotResponse>(
          processes_[rank]->caller(), [&] { return service_.sequences().ReadSnapshot(request); }));
  return ParseSnapshot(response.data());
}

absl::StatusOr<SequenceSnapshot> SystemSimulation::ReadSnapshot(SequenceId id, int64_t plan,
                                                                int rank) {
  HW_ASSIGN_OR_RETURN(SequenceSnapshot own, ReadPart(id, plan, rank, rank));
  if (!own.slots.empty()) return own;
  HW_ASSIGN_OR_RETURN(const SequenceSnapshot shared, ReadPart(id, plan, rank, 0));
  return JoinSnapshots(std::move(own), shared);
}

std::string SystemSimulation::Restore(Talk& talk, const v1::ReopenSequenceResponse& reopened,
                                      bool turn) {
  const auto state = talk.states.find(reopened.plan());
  if (state == talk.states.end()) {
    return absl::StrCat("sequence ", talk.id, " is to go on from plan ", reopened.plan(),
                        ", which no rank has reported with a state");
  }
  if (state->second.tokens_seen != reopened.tokens_seen() ||
      reopened.tokens_seen() >= static_cast<int64_t>(talk.text.size()) ||
      state->second.text_hash != talk.TextHash(reopened.tokens_seen())) {
    return absl::StrCat("sequence ", talk.id, " is to go on from plan ", reopened.plan(), " with ",
                        reopened.tokens_seen(), " tokens, reported were ",
                        state->second.tokens_seen, " of perhaps another text");
  }
  const int64_t known = turn ? reopened.known_tokens() : static_cast<int64_t>(talk.text.size());
  absl::Status status;
  std::vector<bool> open(size());
  for (int rank = 0; rank < size(); ++rank) {
    const auto snapshot = ReadSnapshot(talk.id, reopened.plan(), rank);
    absl::Status here = snapshot.status();
    if (here.ok()) {
      processes_[rank]->tier().Expect(talk.id, talk.options.max_tokens, talk.lease);
      here = group_->cache(rank).Restore(talk.id, talk.options, *snapshot, known);
      if (!here.ok()) processes_[rank]->tier().Forget(talk.id);
    }
    open[rank] = here.ok();
    if (status.ok()) status = here;
  }
  talk.ForgetPlansAfter(reopened.plan());
  if (!status.ok()) {
    world_.trace.Note(absl::StrCat("restore: ", absl::StatusCodeToString(status.code())), talk.id);
    for (int rank = 0; rank < size(); ++rank) {
      if (open[rank]) group_->cache(rank).Close(talk.id).IgnoreError();
    }
    rank_zero().link().RemoveSequence(talk.id);
    talk.where = Talk::Where::kCutOff;
    talk.turn = turn;
    if (!StateIsLost(status)) return "";
    CloseAtService(talk);
    return ComputeAnew(talk);
  }
  world_.trace.Note("restored", talk.id, static_cast<uint64_t>(reopened.tokens_seen()));
  for (const auto& reports : reports_) {
    reports->Resume(talk.id, reopened.plan(), reopened.tokens_seen(), reopened.incarnation());
  }
  talk.where = Talk::Where::kRunning;
  talk.turn = turn;
  talk.tokens_seen = reopened.tokens_seen();
  talk.fresh = false;
  talk.plain = state->second.plain == nullptr
                   ? nullptr
                   : std::make_unique<PlainSequence>(*state->second.plain);
  const size_t row_bytes = TestShape(group_options_, 0).row_bytes();
  for (std::vector<std::byte>& rows : talk.rows) {
    rows.resize(static_cast<size_t>(talk.tokens_seen) * row_bytes);
  }
  return "";
}

// There is nothing to go on from: another sequence takes all of the text in.
std::string SystemSimulation::ComputeAnew(Talk& talk) {
  world_.trace.Note("computed anew", talk.id);
  talk.where = Talk::Where::kCutOff;
  talk.turn = false;
  talk.rows.clear();
  talk.fresh = false;
  talk.id = 0;
  talk.tokens_seen = 0;
  std::string wrong = OpenAndPrompt(talk);
  if (talk.where == Talk::Where::kGone) talk.where = Talk::Where::kCutOff;
  return wrong;
}

void SystemSimulation::Suspend(Talk& talk) {
  v1::SuspendSequenceRequest request;
  request.set_sequence_id(talk.id);
  request.set_ttl_ms(world_.OneIn(2) ? 0 : world_.Between(1000, 30000));
  const auto suspended = world_.network.CallNow<v1::SuspendSequenceResponse>(
      SimCaller(), [&] { return service_.sequences().Suspend(request); });
  world_.trace.Note(absl::StrCat("suspend: ", absl::StatusCodeToString(suspended.status().code())),
                    talk.id);
}

std::string SystemSimulation::Truncate(Talk& talk) {
  if (static_cast<int64_t>(talk.text.size()) < talk.options.prompt_tokens) return "";
  v1::TruncateSequenceRequest request;
  request.set_sequence_id(talk.id);
  request.set_tokens(world_.Between(static_cast<int>(talk.options.prompt_tokens),
                                    static_cast<int>(talk.text.size())));
  const auto truncated = world_.network.CallNow<v1::TruncateSequenceResponse>(
      SimCaller(), [&] { return service_.sequences().Truncate(request); });
  world_.trace.Note(absl::StrCat("truncate: ", absl::StatusCodeToString(truncated.status().code())),
                    talk.id);
  // A client that does not hear of it goes on from all of its text: also good.
  if (!truncated.ok()) return "";
  talk.CutText(request.tokens());
  if (truncated->tokens_seen() > request.tokens()) return "truncated to a state of more tokens";
  return "";
}

}  // namespace heavywater
