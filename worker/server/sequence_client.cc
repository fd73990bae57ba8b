#include "worker/server/sequence_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/trace_context.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(2);
// Its pages may have to come up from disk first.
constexpr absl::Duration kReopenTimeout = absl::Seconds(10);

constexpr int kRoomRetries = 4;
constexpr absl::Duration kRoomRetryDelay = absl::Milliseconds(50);

bool MayFitSoon(const absl::Status& status) {
  const auto shortage = ShortageOf(status);
  return shortage.has_value() && shortage->retry_after != absl::InfiniteDuration();
}

// To a client of generation all of these mean: later.
absl::Status AsUnavailable(const absl::Status& status) {
  // NOT_FOUND: a restarted service, which does not know the group yet.
  if (!ServiceIsAway(status) && !absl::IsAborted(status) && !absl::IsNotFound(status)) {
    return status;
  }
  return absl::UnavailableError(
      absl::StrCat("the cache service cannot open a sequence: ", status.message()));
}

// Of the caller's trace, for so long.
void Begin(grpc::ClientContext& context, absl::Duration timeout) {
  SendTrace(context);
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

}  // namespace

SequenceClient::SequenceClient(CacheLink* link)
    : link_(link),
      opened_epoch_(link == nullptr ? 0 : link->epoch()),
      stub_(link == nullptr ? nullptr : v1::SequenceService::NewStub(link->service()->channel)),
      group_stub_(link == nullptr ? nullptr : v1::GroupService::NewStub(link->service()->channel)) {
}

absl::StatusOr<OpenedSequence> SequenceClient::Open(const SequenceToOpen& sequence) {
  if (link_ == nullptr) return OpenedSequence{.id = ++counter_};
  auto opened = OpenOnce(sequence, sequence.options.prompt_tokens);
  // That a sequence has just finished reaches the service a moment after its
  // client: then it makes room.
  for (int i = 0; i < kRoomRetries && MayFitSoon(opened.status()); ++i) {
    absl::SleepFor(kRoomRetryDelay);
    opened = OpenOnce(sequence, sequence.options.prompt_tokens);
  }
  // Positions that find no page are dropped then: no room is asked for the prompt.
  if (absl::IsResourceExhausted(opened.status()) &&
      sequence.options.on_host_full == OnHostFull::kDrop) {
    opened = OpenOnce(sequence, 0);
  }
  return opened;
}

absl::StatusOr<OpenedSequence> SequenceClient::OpenOnce(const SequenceToOpen& sequence,
                                                        int64_t prompt_tokens) {
  v1::OpenSequenceRequest request;
  // The counter begins anew with each formation of the group.
  request.set_request_id(
      absl::StrCat(link_->options().instance, "/", opened_epoch_, "/", ++counter_));
  request.set_group(link_->options().group);
  request.set_epoch(link_->epoch());
  *request.mutable_fingerprint() = link_->options().fingerprint;
  request.mutable_fingerprint()->set_positions(
      std::string(PositionsName(sequence.options.policy.positions)));
  *request.mutable_policy() = PolicyToProto(sequence.options.policy);
  *request.mutable_budget() = BudgetToProto(sequence.options.policy, sequence.budget);
  request.set_prompt_tokens(prompt_tokens);
  request.set_max_tokens(sequence.options.max_tokens);
  request.set_tenant(sequence.tenant);
  const PrefixToOpen& prefix = sequence.prefix;
  if (!prefix.tokens.empty()) {
    request.mutable_prefix()->mutable_tokens()->Assign(prefix.tokens.begin(), prefix.tokens.end());
    request.mutable_prefix()->set_max_tokens(prefix.max_tokens);
  }
  grpc::ClientContext context;
  const bool may_wait = prefix.max_tokens > 0;
  Begin(context, may_wait ? kReopenTimeout : kTimeout);
  v1::OpenSequenceResponse response;
  const absl::Time sent = link_->clock().Now();
  const absl::Status status = FromGrpcStatus(stub_->Open(&context, request, &response));
  link_->Note(status);
  if (!status.ok()) return AsUnavailable(status);
  link_->AddSequence(response.sequence_id(), sent);
  return OpenedSequence{.id = response.sequence_id(),
                        .lease = absl::Milliseconds(response.lease_ms()),
                        .prefix_tokens = response.prefix_tokens()};
}

absl::StatusOr<v1::Sequence> SequenceClient::Get(SequenceId id) {
  if (link_ == nullptr) return absl::FailedPreconditionError("there is no cache service");
  v1::GetSequenceRequest request;
  request.set_sequence_id(id);
  request.set_first_token(std::numeric_limits<Position>::max());  // none: it is known how many
  grpc::ClientContext context;
  Begin(context, kTimeout);
  v1::Sequence response;
  const absl::Status status = FromGrpcStatus(stub_->Get(&context, request, &response));
  link_->Note(status);
  if (ServiceIsAway(status)) return AsUnavailable(status);
  HW_RETURN_IF_ERROR(status);
  return response;
}

absl::StatusOr<OpenedSequence> SequenceClient::Reopen(SequenceId id, const SequenceToOpen& sequence,
                                                      const std::vector<int32_t>& text,
                                                      int64_t max_tokens_seen, bool extends) {
  if (link_ == nullptr) return absl::FailedPreconditionError("there is no cache service");
  v1::ReopenSequenceRequest request;
  request.set_sequence_id(id);
  request.set_group(link_->options().group);
  request.set_epoch(link_->epoch());
  *request.mutable_policy() = PolicyToProto(sequence.options.policy);
  *request.mutable_budget() = BudgetToProto(sequence.options.policy, sequence.budget);
  request.set_prompt_tokens(sequence.options.prompt_tokens);
  request.set_max_tokens(sequence.options.max_tokens);
  request.set_tenant(sequence.tenant);
  request.set_max_tokens_seen(max_tokens_seen);
  request.set_extends(extends);
  request.mutable_tokens()->Assign(text.begin(), text.end());
  grpc::ClientContext context;
  Begin(context, kReopenTimeout);
  v1::ReopenSequenceResponse response;
  const absl::Time sent = link_->clock().Now();
  const absl::Status status = FromGrpcStatus(stub_->Reopen(&context, request, &response));
  link_->Note(status);
  // NOT_FOUND: it has ended, or the service has begun anew.
  if (ServiceIsAway(status) || absl::IsAborted(status)) return AsUnavailable(status);
  HW_RETURN_IF_ERROR(status);
  link_->AddSequence(id, sent);
  return OpenedSequence{.id = id,
                        .lease = absl::Milliseconds(response.lease_ms()),
                        .plan = response.plan(),
                        .tokens_seen = response.tokens_seen(),
                        .incarnation = response.incarnation(),
                        .known_tokens = response.known_tokens()};
}

// On behalf of the rank, which has nothing to say of it: it writes no more.
absl::Status SequenceClient::ReportUntouched(const OpenedSequence& opened, int rank) {
  v1::ReportPlanRequest request;
  request.set_group(link_->options().group);
  request.set_rank(rank);
  request.set_epoch(link_->epoch());
  v1::PlanReport& report = *request.add_reports();
  report.set_sequence_id(opened.id);
  report.set_plan(opened.plan);
  report.set_tokens_seen(opened.tokens_seen);
  report.set_incarnation(opened.incarnation);
  report.set_finished(true);
  grpc::ClientContext context;
  Begin(context, kTimeout);
  v1::ReportPlanResponse response;
  return FromGrpcStatus(group_stub_->ReportPlan(&context, request, &response));
}

void SequenceClient::GiveBack(const OpenedSequence& opened, absl::Duration suspended) {
  if (link_ == nullptr || !link_->up()) return;
  absl::Status status;
  for (int rank = 0; rank < link_->options().size && status.ok(); ++rank) {
    status = ReportUntouched(opened, rank);
  }
  if (status.ok() && suspended > absl::ZeroDuration()) {
    v1::SuspendSequenceRequest request;
    request.set_sequence_id(opened.id);
    request.set_ttl_ms(std::max<int64_t>(1, absl::ToInt64Milliseconds(suspended)));
    grpc::ClientContext context;
    Begin(context, kTimeout);
    v1::SuspendSequenceResponse response;
    status = FromGrpcStatus(stub_->Suspend(&context, request, &response));
  }
  link_->Note(status);
  if (!status.ok()) {
    LogInfo("sequence not given back; its lease ends it",
            {{"sequence", opened.id}, {"error", status.ToString()}});
  }
}

void SequenceClient::Release(SequenceId sequence, bool discard) {
  if (link_ == nullptr) return;
  link_->RemoveSequence(sequence);
  if (discard) Close(sequence);
}

void SequenceClient::Close(SequenceId sequence) {
  if (link_ == nullptr || !link_->up()) return;
  v1::CloseSequenceRequest request;
  request.set_sequence_id(sequence);
  request.set_request_id(absl::StrCat(link_->options().instance, "/close/", sequence));
  grpc::ClientContext context;
  Begin(context, kTimeout);
  v1::CloseSequenceResponse response;
  const absl::Status status = FromGrpcStatus(stub_->Close(&context, request, &response));
  link_->Note(status);
  if (!status.ok()) {
    LogInfo("sequence not closed; its lease ends it",
            {{"sequence", sequence}, {"error", status.ToString()}});
  }
}

}  // namespace heavywater
