// The scheduler's decode steps, and the end of sequences.
#include <algorithm>
#include <span>
#include <utility>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/trace_context.h"
#include "worker/server/group_channel.h"
#include "worker/server/scheduler.h"

namespace heavywater {
namespace {

// How soon a sequence goes on after its client has read.
constexpr absl::Duration kFullQueuePoll = absl::Milliseconds(5);

// Of a snapshot, in a layer, about: a resident; a demoted position with recall.
constexpr int64_t kSlotBytes = 10;
constexpr int64_t kLedgerBytes = 10;
constexpr int64_t kSnapshotBytesPerToken = 16 << 10;

}  // namespace

absl::StatusOr<bool> Scheduler::RunDecode() {
  v1::GroupCommand command;
  v1::DecodeCommand& decode = *command.mutable_decode();
  const std::vector<SequenceRun*> runs = FillDecode(decode);
  if (runs.empty()) return false;
  decode.set_step(++step_);
  const absl::Time start = absl::Now();
  HW_ASSIGN_OR_RETURN(const CommandResult result, Execute(command));
  const absl::Duration took = absl::Now() - start;
  metrics_.ObserveStep("decode", took);
  if (!result.status.ok()) {
    for (SequenceRun* run : runs) HW_RETURN_IF_ERROR(End(*run, result.status));
    return true;
  }
  HW_RETURN_IF_ERROR(AfterDecode(runs, decode, result, took));
  return true;
}

// One token of each sequence; suffixes share what room is left.
std::vector<SequenceRun*> Scheduler::FillDecode(v1::DecodeCommand& decode) const {
  std::vector<SequenceRun*> runs;
  for (const auto& run : runs_) {
    if (run->prompt_done() && !run->responses().full()) runs.push_back(run.get());
  }
  const auto ones = static_cast<int64_t>(runs.size());
  int64_t room =
      std::min(options_.append_step_tokens, runner_.cache().options().max_step_tokens - ones);
  for (const SequenceRun* run : runs) {
    *decode.add_items() = MakeItem(*run, 1 + room);
    room -= decode.items().rbegin()->tokens_size() - 1;
  }
  return runs;
}

v1::DecodeCommand::Item Scheduler::MakeItem(const SequenceRun& run, int64_t token_limit) const {
  const std::span<const int32_t> tokens = run.NextTokens(token_limit);
  v1::DecodeCommand::Item item;
  item.set_sequence_id(run.id());
  item.set_first_position(static_cast<Position>(run.tokens_seen()));
  item.mutable_tokens()->Add(tokens.begin(), tokens.end());
  item.set_plan_due(runner_.cache().PlanDue(run.id(), item.tokens_size()));
  const auto stats = runner_.cache().Stats(run.id());
  // Plans count from 1 at the prompt's end, so this one's number is plans + 2.
  item.set_report_sets(item.plan_due() && stats.ok() &&
                       (stats->plans + 2) % options_.report_interval_plans == 0);
  item.set_return_reads(run.request().return_reads);
  item.set_snapshot(stats.ok() && SnapshotDue(run, item, *stats));
  return item;
}

// At a plan; anywhere for policies that leave nothing pending until one. The larger
// the state, the rarer: in the long run 16 KiB a token. What lies between is computed
// again after a failure.
bool Scheduler::SnapshotDue(const SequenceRun& run, const v1::DecodeCommand::Item& item,
                            const SequenceStats& stats) const {
  if (options_.snapshot_interval_tokens == 0) return false;
  const bool recalls = run.request().sequence.policy.recall.enabled;
  const bool at_any_step = !stats.budget.bounded_decode && !stats.budget.uses_scores && !recalls;
  if (!item.plan_due() && !at_any_step) return false;
  const int64_t per_layer =
      kSlotBytes * stats.tokens_resident + (recalls ? kLedgerBytes * stats.tokens_seen : 0);
  const int64_t bytes = per_layer * runner_.cache().options().shape.num_layers;
  const int64_t interval =
      std::max(options_.snapshot_interval_tokens, bytes / kSnapshotBytesPerToken);
  return run.tokens_seen() + item.tokens_size() - run.snapshot_tokens() >= interval;
}

absl::Status Scheduler::AfterDecode(const std::vector<SequenceRun*>& runs,
                                    const v1::DecodeCommand& decode, const CommandResult& result,
                                    absl::Duration took) {
  std::vector<std::pair<SequenceRun*, size_t>> advanced;  // with its item
  std::vector<SequenceRun*> alive;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (!result.item_status[i].ok()) {
      HW_RETURN_IF_ERROR(End(*runs[i], result.item_status[i]));
      continue;
    }
    const int taken = decode.items(static_cast<int>(i)).tokens_size();
    if (runs[i]->appending()) metrics_.AddPromptTokens(taken);
    runs[i]->TokensTaken(taken, took);
    if (decode.items(static_cast<int>(i)).snapshot()) runs[i]->NoteSnapshot();
    runs[i]->AddReads(result.reads[i]);
    alive.push_back(runs[i]);
    if (!runs[i]->appending()) advanced.push_back({runs[i], i});
  }
  if (step_ % static_cast<uint64_t>(options_.figures_interval_steps) == 0) {
    HW_RETURN_IF_ERROR(RefreshFigures(alive));
  }
  metrics_.AddTokens(static_cast<int64_t>(advanced.size()));
  for (const auto& [run, item] : advanced) {
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, runner_.cache().Stats(run->id()));
    const absl::Status taken = run->TakeLogits(result.logits[item], stats);
    if (!taken.ok()) {
      HW_RETURN_IF_ERROR(End(*run, taken));
    } else if (run->finished()) {
      HW_RETURN_IF_ERROR(Complete(*run));
    }
  }
  return absl::OkStatus();
}

absl::Status Scheduler::RefreshFigures(const std::vector<SequenceRun*>& runs) {
  if (runs.empty()) return absl::OkStatus();
  v1::GroupCommand command;
  for (SequenceRun* run : runs) command.mutable_figures()->add_sequence_ids(run->id());
  HW_ASSIGN_OR_RETURN(const CommandResult result, Execute(command));
  for (size_t i = 0; i < runs.size(); ++i) runs[i]->set_figures(result.figures[i]);
  return absl::OkStatus();
}

absl::Status Scheduler::Complete(SequenceRun& run) {
  HW_RETURN_IF_ERROR(RefreshFigures({&run}));
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, runner_.cache().Stats(run.id()));
  HW_ASSIGN_OR_RETURN(const CommandResult closed, Close(run));
  run.SendSummary(stats, runner_.communicator().size(), closed.plan);
  Finish(run, absl::OkStatus());
  return absl::OkStatus();
}

absl::Status Scheduler::End(SequenceRun& run, const absl::Status& status) {
  HW_RETURN_IF_ERROR(Close(run).status());
  Finish(run, status);
  return absl::OkStatus();
}

absl::StatusOr<CommandResult> Scheduler::Close(const SequenceRun& run) {
  v1::GroupCommand command;
  command.mutable_close()->set_sequence_id(run.id());
  command.mutable_close()->set_report_sets(true);
  return Execute(command);
}

void Scheduler::Finish(SequenceRun& run, const absl::Status& status) {
  const ScopedTrace trace(run.trace());
  LogInfo(
      "sequence ended",
      {{"sequence", run.id()}, {"tokens_seen", run.tokens_seen()}, {"status", status.ToString()}});
  run.responses().Finish(status);
  std::erase_if(runs_, [&](const auto& other) { return other.get() == &run; });
  num_running_ = static_cast<int64_t>(runs_.size());
}

absl::Status Scheduler::Idle() {
  const absl::Duration wait =
      runs_.empty() ? kIdleInterval - (absl::Now() - last_command_) : kFullQueuePoll;
  if (wait > absl::ZeroDuration()) queue_.WaitForWork(wait);
  if (absl::Now() - last_command_ < kIdleInterval) return absl::OkStatus();
  v1::GroupCommand command;
  command.mutable_idle();
  return Execute(command).status();
}

void Scheduler::FailAll(const absl::Status& status) {
  queue_.Close(status);
  queue_.FinishAll(status);
  for (const auto& run : runs_) run->responses().Finish(status);
  runs_.clear();
  num_running_ = 0;
}

}  // namespace heavywater
