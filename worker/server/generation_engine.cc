#include "worker/server/generation_engine.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/turn_request.h"

namespace heavywater {
namespace {

// For the step to close what a client has left.
constexpr absl::Duration kEndTimeout = absl::Seconds(3);
constexpr absl::Duration kReportPoll = absl::Milliseconds(10);

// A text that has begun may not be turned away for good: its client comes again.
absl::Status LaterIfResumed(bool resumed, const absl::Status& queued) {
  if (!resumed || !absl::IsResourceExhausted(queued)) return queued;
  return absl::UnavailableError(queued.message());
}

// There is nothing left to go on with, so that its text must be computed again.
bool IsGone(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsDataLoss(status);
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedGeneration>> GenerationEngine::Start(
    const v1::GenerateRequest& proto) {
  HW_ASSIGN_OR_RETURN(GenerationRequest request, Parse(proto));
  HW_RETURN_IF_ERROR(memory_.Check(request.sequence));
  HW_RETURN_IF_ERROR(LaterIfResumed(proto.has_resume(), queue_.CheckRoom()));
  const SequenceId resumed = request.resume_sequence;
  HW_ASSIGN_OR_RETURN(const bool claimed, ClaimSequence(request));
  const absl::Cleanup release = [&] {
    if (claimed) ReleaseSequence(resumed);
  };
  const std::string tenant = request.tenant;
  HW_RETURN_IF_ERROR(ClaimRequestId(tenant, proto.request_id()));
  auto generation = OpenAndQueue(std::move(request), claimed);
  if (!generation.ok()) ReleaseRequestId(tenant, proto.request_id());
  return generation;
}

absl::StatusOr<GenerationRequest> GenerationEngine::Parse(const v1::GenerateRequest& proto) {
  if (proto.continue_sequence_id() == 0) return ParseGenerateRequest(proto, limits_);
  HW_RETURN_IF_ERROR(CheckTurn(proto));
  // A broken stream may be one that was computed anew, as another sequence.
  const SequenceId id =
      proto.has_resume() ? proto.resume().sequence_id() : proto.continue_sequence_id();
  const absl::StatusOr<v1::Sequence> known = sequences_.Get(id);
  if (absl::IsUnavailable(known.status())) return known.status();
  HW_ASSIGN_OR_RETURN(GenerationRequest anew, ParseGenerateRequest(proto, limits_));
  // To other tenants it is as if it were not there. Of one without a known prompt not all is in
  // host memory.
  if (known.ok() && known->tenant() == anew.tenant && known->prompt_tokens() > 0) {
    HW_ASSIGN_OR_RETURN(GenerationRequest turn, ParseTurn(proto, *known, limits_));
    if (known->suspended()) {
      turn.suspended_until = absl::Now() + absl::Milliseconds(known->lease_remaining_ms());
    }
    return turn;
  }
  LogWarn("a turn's text is computed anew",
          {{"sequence", id}, {"reason", known.status().ToString()}});
  return anew;
}

void GenerationEngine::Suspend(SequenceId sequence) {
  MutexLock lock(&mutex_);
  const auto running = running_.find(sequence);
  if (running == running_.end()) return;
  running->second->Cancel(ServedGeneration::CutOff::kSuspended);
  queue_.Wake();
}

absl::StatusOr<std::shared_ptr<ServedGeneration>> GenerationEngine::OpenAndQueue(
    GenerationRequest request, bool claimed) {
  HW_ASSIGN_OR_RETURN(const OpenedSequence opened, OpenSequence(request, claimed));
  auto generation = std::make_shared<ServedGeneration>(std::move(request), opened);
  const absl::Status queued =
      LaterIfResumed(generation->request.resume_sequence != 0, queue_.Submit(generation));
  if (!queued.ok()) {
    GiveBack(*generation);
    sequences_.Release(opened.id, /*discard=*/!opened.restored());
    return queued;
  }
  MutexLock lock(&mutex_);
  running_[opened.id] = generation;
  return generation;
}

absl::StatusOr<OpenedSequence> GenerationEngine::OpenSequence(const GenerationRequest& request,
                                                              bool claimed) {
  if (claimed) {
    auto reopened = Reopen(request);
    if (reopened.ok() || absl::IsUnavailable(reopened.status())) return reopened;
    if (request.turn && !request.is_back && !IsGone(reopened.status())) return reopened;
    LogWarn("sequence is computed again from its tokens",
            {{"sequence", request.resume_sequence}, {"reason", reopened.status().ToString()}});
    // Its pages make room for the new one's.
    if (absl::IsDataLoss(reopened.status())) sequences_.Close(request.resume_sequence);
  } else if (request.resume_sequence != 0) {
    LogWarn("sequence is computed again from its tokens",
            {{"sequence", request.resume_sequence},
             {"reason", "there is no cache service, or the sequence runs for another request"}});
  }
  SequenceToOpen sequence = {
      .options = request.sequence, .budget = request.budget, .tenant = request.tenant};
  if (request.prefix.offered) {
    sequence.prefix = {.tokens = request.prompt, .max_tokens = request.prefix.max_tokens};
  }
  return sequences_.Open(sequence);
}

bool GenerationEngine::WaitForReports(SequenceId sequence) {
  absl::Time deadline = absl::InfinitePast();
  {
    MutexLock lock(&mutex_);
    const auto ended = ended_.find(sequence);
    if (ended != ended_.end()) deadline = ended->second + kEndTimeout;
  }
  while (true) {
    const absl::StatusOr<v1::Sequence> known = sequences_.Get(sequence);
    if (!known.ok()) return false;
    if (known->finished()) return true;
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(kReportPoll);
  }
}

absl::StatusOr<OpenedSequence> GenerationEngine::Reopen(const GenerationRequest& request) {
  const bool was_finished = request.turn && WaitForReports(request.resume_sequence);
  std::vector<int32_t> text = request.prompt;
  text.insert(text.end(), request.suffix.begin(), request.suffix.end());
  text.insert(text.end(), request.received.begin(), request.received.end());
  // The last one is to be taken in again, for the logits after it.
  const auto max_tokens_seen = static_cast<int64_t>(text.size()) - 1;
  auto reopened = sequences_.Reopen(
      request.resume_sequence,
      {.options = request.sequence, .budget = request.budget, .tenant = request.tenant}, text,
      max_tokens_seen, request.turn);
  if (reopened.ok()) reopened->was_finished = was_finished;
  return reopened;
}

absl::StatusOr<bool> GenerationEngine::ClaimSequence(const GenerationRequest& request) {
  const SequenceId sequence = request.resume_sequence;
  if (sequence == 0 || !sequences_.has_service()) return false;
  const absl::Time deadline = absl::Now() + kEndTimeout;
  MutexLock lock(&mutex_);
  while (true) {
    const auto running = running_.find(sequence);
    if (running == running_.end()) {
      if (claimed_.insert(sequence).second) return true;
    } else if (request.is_back) {
      if (!running->second->IsContinuedBy(request)) return false;
      running->second->Cancel(ServedGeneration::CutOff::kTakenOver);
      queue_.Wake();
    }
    if (absl::Now() >= deadline) break;
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  return absl::UnavailableError(
      absl::StrCat("sequence ", sequence, " still runs for another call"));
}

void GenerationEngine::ReleaseSequence(SequenceId sequence) {
  MutexLock lock(&mutex_);
  claimed_.erase(sequence);
  changed_.SignalAll();
}

// What no rank has begun with is as if it had not been asked for. Where a rank still wrote to it
// when it was reopened, nobody can say for that rank that it writes no more.
void GenerationEngine::GiveBack(const ServedGeneration& generation) {
  const OpenedSequence& opened = generation.opened;
  if (!opened.restored() || !opened.was_finished || generation.reached_ranks) return;
  sequences_.GiveBack(generation.opened, generation.request.suspended_until - absl::Now());
}

void GenerationEngine::End(const ServedGeneration& generation, bool any_output) {
  GiveBack(generation);
  // What goes on is kept, whatever this call has told its client.
  const bool keep = any_output || generation.opened.restored() || generation.goes_on_elsewhere();
  sequences_.Release(generation.sequence, /*discard=*/!keep || generation.restore_failed);
  ReleaseRequestId(generation.request.tenant, generation.request.request_id);
  MutexLock lock(&mutex_);
  running_.erase(generation.sequence);
  const absl::Time now = absl::Now();
  std::erase_if(ended_, [&](const auto& one) { return one.second + kEndTimeout < now; });
  ended_[generation.sequence] = now;
  changed_.SignalAll();
}

absl::Status GenerationEngine::ClaimRequestId(const std::string& tenant,
                                              const std::string& request_id) {
  if (request_id.empty()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (request_ids_.insert({tenant, request_id}).second) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("request_id \"", request_id, "\" is that of a request that runs"));
}

void GenerationEngine::ReleaseRequestId(const std::string& tenant, const std::string& request_id) {
  MutexLock lock(&mutex_);
  request_ids_.erase({tenant, request_id});
}

}  // namespace heavywater
