#include "worker/server/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/trace_context.h"
#include "worker/server/group_channel.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

// To a client it does not matter which rank was it: later, perhaps elsewhere.
absl::Status GroupFailed(const absl::Status& status) {
  return absl::UnavailableError(absl::StrCat("the worker group failed: ", status.ToString()));
}

// The state itself is gone or broken; anything else (the service is away, memory is
// short) may be over when the client comes again.
bool StateIsLost(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) || absl::IsDataLoss(status);
}

// The client comes again, for what is kept or to have it computed from its tokens.
absl::Status NotRestored(const absl::Status& status) {
  return absl::UnavailableError(
      absl::StrCat("the sequence cannot be restored: ", status.ToString()));
}

// Pages that the service has given it; the client comes again, for others or for none.
absl::Status NotTakenOver(const absl::Status& status) {
  return absl::UnavailableError(
      absl::StrCat("the stored prefix cannot be taken over: ", status.ToString()));
}

std::string NameOf(OnHostFull on_host_full) {
  return on_host_full == OnHostFull::kDrop ? "drop" : "stop";
}

v1::GroupCommand OpenCommandOf(const ServedGeneration& generation) {
  const GenerationRequest& request = generation.request;
  v1::GroupCommand command;
  v1::OpenCommand& open = *command.mutable_open();
  open.set_sequence_id(generation.sequence);
  *open.mutable_policy() = PolicyToProto(request.sequence.policy);
  open.set_max_tokens(request.sequence.max_tokens);
  open.mutable_prompt()->Assign(request.prompt.begin(), request.prompt.end());
  open.set_lease_ms(absl::ToInt64Milliseconds(generation.lease));
  open.set_on_host_full(NameOf(request.sequence.on_host_full));
  open.set_stored_tokens(generation.opened.prefix_tokens);
  return command;
}

v1::GroupCommand RestoreCommandOf(const ServedGeneration& generation) {
  const GenerationRequest& request = generation.request;
  v1::GroupCommand command;
  v1::RestoreCommand& restore = *command.mutable_restore();
  restore.set_sequence_id(generation.sequence);
  *restore.mutable_policy() = PolicyToProto(request.sequence.policy);
  restore.set_prompt_tokens(request.sequence.prompt_tokens);
  restore.set_max_tokens(request.sequence.max_tokens);
  restore.set_lease_ms(absl::ToInt64Milliseconds(generation.lease));
  restore.set_on_host_full(NameOf(request.sequence.on_host_full));
  restore.set_plan(generation.opened.plan);
  restore.set_tokens_seen(generation.opened.tokens_seen);
  restore.set_incarnation(generation.opened.incarnation);
  const auto text =
      static_cast<int64_t>(request.prompt.size() + request.suffix.size() + request.received.size());
  // What lies in the pages behind a turn's known tokens is of another text.
  restore.set_known_tokens(request.turn ? generation.opened.known_tokens : text);
  return command;
}

}  // namespace

Scheduler::Scheduler(CommandRunner& runner, AdmissionQueue& queue, const Tokenizer& tokenizer,
                     WorkerMetrics& metrics, SchedulerOptions options)
    : runner_(runner),
      queue_(queue),
      tokenizer_(tokenizer),
      metrics_(metrics),
      options_(options),
      last_command_(absl::Now()) {}

absl::Status Scheduler::Run() {
  absl::Status status;
  while (status.ok() && !stopping_) status = RunOnce();
  if (status.ok()) {
    while (status.ok() && !runs_.empty()) {
      status = End(*runs_.back(), absl::UnavailableError("the worker is shutting down"));
    }
    v1::GroupCommand command;
    command.mutable_shutdown();
    if (status.ok()) status = Execute(command).status();
  }
  FailAll(status.ok() ? absl::UnavailableError("the worker is shutting down")
                      : GroupFailed(status));
  return status;
}

absl::Status Scheduler::RunOnce() {
  queue_.FinishCancelled();
  HW_RETURN_IF_ERROR(CloseCancelled());
  HW_RETURN_IF_ERROR(Admit());
  HW_ASSIGN_OR_RETURN(const bool worked, Work());
  metrics_.SetSequences(static_cast<int64_t>(queue_.size()), num_running_);
  return worked ? absl::OkStatus() : Idle();
}

absl::StatusOr<bool> Scheduler::Work() {
  const StepPhaseScope phase(StepPhase::kOther);
  HW_ASSIGN_OR_RETURN(const bool prompted, RunPrompts());
  HW_ASSIGN_OR_RETURN(const bool decoded, RunDecode());
  return prompted || decoded;
}

void Scheduler::Stop() {
  queue_.Close(absl::UnavailableError("the worker is shutting down"));
  stopping_ = true;
  queue_.Wake();
}

absl::StatusOr<CommandResult> Scheduler::Execute(const v1::GroupCommand& command) {
  HW_RETURN_IF_ERROR(SendCommand(command, runner_.communicator(), options_.comm_timeout));
  if (command.has_close()) metrics_.Update(runner_.cache(), /*now=*/true);
  auto result = runner_.Run(command);
  last_command_ = absl::Now();
  metrics_.Update(runner_.cache());
  return result;
}

absl::Status Scheduler::CloseCancelled() {
  for (size_t i = runs_.size(); i > 0; --i) {
    SequenceRun& run = *runs_[i - 1];
    if (run.responses().cancelled()) {
      HW_RETURN_IF_ERROR(End(run, run.cancelled_status()));
    } else if (ClientStalls(run)) {
      run.responses().Abandon();
      HW_RETURN_IF_ERROR(End(
          run, absl::DeadlineExceededError(absl::StrCat(
                   "the client has read nothing for ", absl::FormatDuration(options_.client_stall),
                   " and holds a place that others wait for"))));
    }
  }
  return absl::OkStatus();
}

// It holds device memory and a place in the batch: not for as long as it likes.
bool Scheduler::ClientStalls(const SequenceRun& run) const {
  return absl::Now() - run.responses().full_since() >= options_.client_stall;
}

absl::Status Scheduler::Admit() {
  while (static_cast<int>(runs_.size()) < options_.max_batch) {
    const std::shared_ptr<ServedGeneration> generation = queue_.Front();
    if (generation == nullptr || !FitsNow(*generation)) return absl::OkStatus();
    queue_.PopFront();
    HW_RETURN_IF_ERROR(Open(generation));
  }
  return absl::OkStatus();
}

// A sequence that cannot fit a device without others has been refused before it
// was queued; with no others there is nothing to wait for.
bool Scheduler::FitsNow(const ServedGeneration& generation) const {
  if (runs_.empty()) return true;
  const auto need = runner_.cache().DeviceBytesNeeded(generation.request.sequence);
  return !need.ok() || *need <= runner_.cache().memory().free_bytes();
}

absl::Status Scheduler::Open(const std::shared_ptr<ServedGeneration>& generation) {
  const ScopedTrace trace(generation->trace);
  auto run = SequenceRun::Create(generation, tokenizer_);
  if (!run.ok()) {
    generation->responses.Finish(run.status());
    return absl::OkStatus();
  }
  const GenerationRequest& request = generation->request;
  const bool restored = generation->opened.restored();
  const v1::GroupCommand command =
      restored ? RestoreCommandOf(*generation) : OpenCommandOf(*generation);
  generation->reached_ranks = true;
  const auto result = Execute(command);
  if (!result.ok()) {
    generation->responses.Finish(GroupFailed(result.status()));
    return result.status();
  }
  if (!result->status.ok()) {
    generation->restore_failed = restored && StateIsLost(result->status);
    const bool stored = generation->opened.prefix_tokens > 0 && StateIsLost(result->status);
    generation->responses.Finish(restored ? NotRestored(result->status)
                                 : stored ? NotTakenOver(result->status)
                                          : result->status);
    return absl::OkStatus();
  }
  runs_.push_back(*std::move(run));
  num_running_ = static_cast<int64_t>(runs_.size());
  LogInfo("sequence admitted", {{"sequence", generation->sequence},
                                {"prompt_tokens", request.prompt.size()},
                                {"restored_tokens", generation->opened.tokens_seen},
                                {"stored_tokens", generation->opened.prefix_tokens},
                                {"running", runs_.size()}});
  if (request.resume_sequence != 0) metrics_.CountRestored(restored);
  return restored ? StartRestored(*runs_.back()) : absl::OkStatus();
}

absl::Status Scheduler::StartRestored(SequenceRun& run) {
  HW_RETURN_IF_ERROR(RefreshFigures({&run}));
  const absl::Status started = run.StartAt(run.restored_tokens());
  if (!started.ok()) return End(run, started);
  return run.finished() ? Complete(run) : absl::OkStatus();
}

}  // namespace heavywater
