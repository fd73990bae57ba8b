// One sequence becomes two.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

// Pages that were brought up may go down again before the sequences are locked: then once more.
constexpr int kMaxRounds = 4;

}  // namespace

absl::StatusOr<v1::ForkSequenceResponse> SequenceRegistry::Fork(
    const v1::ForkSequenceRequest& request, const Viewer& viewer) {
  HW_RETURN_IF_ERROR(CheckText("request_id", request.request_id(), 1, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("lease_ms", request.lease_ms(), 0, kMaxLeaseMs));
  absl::Status refused;  // in the last round: pages come and go faster than this
  // The first round only finds out whether there is something to prepare.
  for (int round = 0; round <= kMaxRounds; ++round) {
    absl::StatusOr<v1::ForkSequenceResponse> forked;
    absl::Status store_full;
    {
      MutexLock lock(&mutex_);
      forked = TryFork(request, viewer, /*prepared=*/round > 0, &store_full);
    }
    // Both wait for the tiers below, so not under the lock.
    if (!store_full.ok()) {
      HW_RETURN_IF_ERROR(MakeRoom(store_full, /*spared=*/request.sequence_id()));
      refused = store_full;
    } else if (absl::IsUnavailable(forked.status())) {
      HW_RETURN_IF_ERROR(BringUp(request.sequence_id()));
      HW_RETURN_IF_ERROR(
          store_.PrepareShare(request.sequence_id(), kAllTokens - 1, /*exact=*/false).status());
      refused = forked.status();
    } else {
      return forked;
    }
  }
  return refused;
}

// The first answer, to the same request again.
absl::StatusOr<std::optional<v1::ForkSequenceResponse>> SequenceRegistry::ForkReplay(
    const v1::ForkSequenceRequest& request, const Viewer& viewer) const {
  const auto first = forks_.find({request.sequence_id(), request.request_id()});
  if (first == forks_.end() || !viewer.Sees(first->second.tenant)) return std::nullopt;
  if (first->second.asked_lease_ms == request.lease_ms()) return first->second.response;
  return absl::AlreadyExistsError(
      absl::StrCat("request_id \"", request.request_id(), "\" was used for sequence ",
                   first->second.response.sequence_id(), " with lease_ms ",
                   first->second.asked_lease_ms, ", not ", request.lease_ms()));
}

absl::Status SequenceRegistry::CheckFork(SequenceId id, const Record& record) {
  HW_RETURN_IF_ERROR(record.plans.agreement());
  if (MayRun(record)) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, " runs, want one that has ended or was suspended"));
  }
  if (record.plans.FindSnapshot(kAllTokens) != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", id, " has no committed state yet, from which two could go on"));
}

absl::StatusOr<v1::ForkSequenceResponse> SequenceRegistry::TryFork(
    const v1::ForkSequenceRequest& request, const Viewer& viewer, bool prepared,
    absl::Status* store_full) {
  HW_ASSIGN_OR_RETURN(const std::optional<v1::ForkSequenceResponse> replay,
                      ForkReplay(request, viewer));
  if (replay.has_value()) return *replay;
  const SequenceId parent = request.sequence_id();
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(parent, viewer));
  Advance(parent, found->second);
  HW_RETURN_IF_ERROR(CheckFork(parent, found->second));
  // Of those that make room it is the last.
  found->second.last_use = clock_.Now();
  if (!prepared) return absl::UnavailableError("its pages are to be checked");
  HW_ASSIGN_OR_RETURN(const SequenceId in_the_way, InTheWayOfFork(parent));
  const SequenceId id = NextId();
  HW_ASSIGN_OR_RETURN(const int64_t tokens, ForkPages(parent, found->second, id, store_full));
  next_id_ = id + 1;
  if (in_the_way != 0) Reclaim(in_the_way);
  const int64_t page_tokens = found->second.request.fingerprint().page_tokens();
  v1::ForkSequenceResponse response;
  response.set_sequence_id(id);
  response.set_tokens_seen(found->second.plans.FindSnapshot(kAllTokens)->tokens_seen);
  response.set_shared_tokens(tokens / page_tokens * page_tokens);
  return AddFork(request, found->second, std::move(response));
}

// Where there are as many sequences as there may be: a finished one, which ends; 0: none need.
absl::StatusOr<SequenceId> SequenceRegistry::InTheWayOfFork(SequenceId parent) {
  if (static_cast<int64_t>(records_.size()) < options_.max_sequences) return 0;
  for (const Finished& one : FinishedSequences()) {
    if (one.id != parent) return one.id;
  }
  return ExhaustedError(absl::StrCat("there are ", records_.size(),
                                     " sequences, none of the others finished; the limit is ",
                                     options_.max_sequences),
                        {.subject = "max_sequences",
                         .need = 1,
                         .limit = options_.max_sequences,
                         .retry_after = absl::Seconds(1)});
}

// UNAVAILABLE: not all of its pages are in host memory and ready; DATA_LOSS: nor will they be.
absl::StatusOr<int64_t> SequenceRegistry::ForkPages(SequenceId parent, const Record& record,
                                                    SequenceId child, absl::Status* store_full) {
  const v1::OpenSequenceRequest& opened = record.request;
  HW_ASSIGN_OR_RETURN(const PageGeometry geometry, GeometryOf(opened.fingerprint()));
  const auto known = static_cast<int64_t>(record.plans.tokens().size());
  const int64_t want = record.plans.FindSnapshot(kAllTokens)->tokens_seen;
  const absl::StatusOr<int64_t> tokens =
      store_.OpenFrom({.sequence = child,
                       .fingerprint = FingerprintIdOf(opened.fingerprint()),
                       .geometry = geometry,
                       .num_ranks = record.num_ranks,
                       .max_tokens = opened.max_tokens(),
                       .prompt_tokens = opened.prompt_tokens(),
                       .tenant = opened.tenant(),
                       .dtype = PageDtypeOf(opened.fingerprint().dtype())},
                      {.sequence = parent, .tokens = known, .fork = true, .min_tokens = want});
  if (absl::IsResourceExhausted(tokens.status())) *store_full = tokens.status();
  return tokens;
}

v1::ForkSequenceResponse SequenceRegistry::AddFork(const v1::ForkSequenceRequest& request,
                                                   const Record& parent,
                                                   v1::ForkSequenceResponse response) {
  const SequenceId id = response.sequence_id();
  v1::OpenSequenceRequest opened = parent.request;
  opened.set_request_id(absl::StrCat("fork/", request.sequence_id(), "/", id));
  const absl::Duration lease =
      request.lease_ms() == 0 ? parent.lease : absl::Milliseconds(request.lease_ms());
  response.set_lease_ms(absl::ToInt64Milliseconds(lease));
  Record& record = AddRecord(id, opened, parent.num_ranks, lease);
  record.plans = parent.plans.ForkedAs(id);
  record.incarnation = parent.incarnation;
  record.last_listed = absl::InfinitePast();  // no rank has it open
  *record.fork.mutable_request() = request;
  *record.fork.mutable_response() = response;
  RememberFork(record);
  BoundSnapshots();
  OfferPrefix(id, record);
  Save(id, record);
  return response;
}

// What is remembered is bounded like the living.
void SequenceRegistry::RememberFork(const Record& record) {
  const v1::ForkSequenceRequest& request = record.fork.request();
  forks_[{request.sequence_id(), request.request_id()}] = {
      record.request.tenant(), request.lease_ms(), record.fork.response()};
  if (static_cast<int64_t>(forks_.size()) <= options_.max_sequences) return;
  forks_.erase(std::min_element(forks_.begin(), forks_.end(), [](const auto& a, const auto& b) {
    return a.second.response.sequence_id() < b.second.response.sequence_id();
  }));
}

}  // namespace heavywater
