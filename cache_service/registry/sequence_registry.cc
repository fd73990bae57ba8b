#include "cache_service/registry/sequence_registry.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/registry/plan_sets.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
// A sequence message stays below gRPC's limit of 4 MiB with 5 bytes a token
// (none is negative).
constexpr int64_t kMaxTokensInMessage = 700'000;

// What is kept of a request: not the prompt.
v1::OpenSequenceRequest Kept(v1::OpenSequenceRequest request) {
  if (request.has_prefix()) request.mutable_prefix()->Clear();
  return request;
}

size_t HashOf(const v1::OpenSequenceRequest& request) {
  return std::hash<std::string>()(Kept(request).SerializeAsString());
}

absl::Status CheckOpen(const v1::OpenSequenceRequest& request) {
  HW_RETURN_IF_ERROR(CheckText("request_id", request.request_id(), 1, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckText("tenant", request.tenant(), 0, kMaxNameBytes));
  const v1::PolicyOptions& policy = request.policy();
  HW_RETURN_IF_ERROR(CheckText("policy.policy", policy.policy(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckText("policy.scope", policy.scope(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckText("policy.pooling", policy.pooling(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("lease_ms", request.lease_ms(), 0, kMaxLeaseMs));
  HW_RETURN_IF_ERROR(
      CheckInt("max_tokens", request.max_tokens(), 1, std::numeric_limits<Position>::max()));
  HW_RETURN_IF_ERROR(CheckInt("prompt_tokens", request.prompt_tokens(), 0, request.max_tokens()));
  const v1::ResolvedBudget& budget = request.budget();
  const int64_t max = std::numeric_limits<Position>::max();
  HW_RETURN_IF_ERROR(CheckText("budget.policy", budget.policy(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("budget.budget_tokens", budget.budget_tokens(), 0, max));
  HW_RETURN_IF_ERROR(CheckInt("budget.sink_tokens", budget.sink_tokens(), 0, max));
  HW_RETURN_IF_ERROR(CheckInt("budget.recent_tokens", budget.recent_tokens(), 0, max));
  const int num_layers = request.fingerprint().num_layers();
  HW_RETURN_IF_ERROR(CheckInt("number of budget.layer_budget_tokens",
                              budget.layer_budget_tokens_size(), 0, num_layers));
  HW_RETURN_IF_ERROR(CheckInt("number of budget.layer_recent_tokens",
                              budget.layer_recent_tokens_size(), 0, num_layers));
  for (const int64_t recent : budget.layer_recent_tokens()) {
    HW_RETURN_IF_ERROR(CheckInt("budget.layer_recent_tokens", recent, 0, max));
  }
  const std::string& scope = budget.scope();
  if (scope == "layer" || scope == "kv_head") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("budget.scope is \"", scope, "\", want \"layer\" or \"kv_head\""));
}

}  // namespace

SequenceRegistry::SequenceRegistry(const RegistryOptions& options, PageStore& store, Clock& clock,
                                   StateStore* state)
    : options_(options),
      store_(store),
      clock_(clock),
      state_(state),
      next_id_(options.first_sequence_id),
      prefixes_(options.max_prefix_pages),
      pins_(options.max_pins) {}

absl::StatusOr<v1::OpenSequenceResponse> SequenceRegistry::Replay(
    const v1::OpenSequenceRequest& request, const FirstAnswer& first) const {
  if (HashOf(request) == first.request_hash) return first.response;
  return absl::AlreadyExistsError(
      absl::StrCat("request_id \"", request.request_id(), "\" was used for sequence ",
                   first.response.sequence_id(), " with another request"));
}

absl::StatusOr<v1::OpenSequenceResponse> SequenceRegistry::Open(
    const v1::OpenSequenceRequest& request, int num_ranks, bool may_share) {
  HW_RETURN_IF_ERROR(CheckOpen(request));
  HW_RETURN_IF_ERROR(CheckPrefix(request));
  HW_ASSIGN_OR_RETURN(const PageGeometry geometry, GeometryOf(request.fingerprint()));
  const Prefix prefix = may_share && request.has_prefix() ? FindPrefix(request) : Prefix();
  while (true) {
    absl::Status store_full;
    {
      MutexLock lock(&mutex_);
      auto opened = TryOpen(request, num_ranks, geometry, prefix, &store_full);
      if (store_full.ok()) return opened;
    }
    // Waits for the tiers below, so not under the lock.
    HW_RETURN_IF_ERROR(MakeRoom(store_full));
  }
}

bool SequenceRegistry::OpenMayWait(const v1::OpenSequenceRequest& request) {
  if (!request.has_prefix() || !CheckOpen(request).ok() || !CheckPrefix(request).ok()) return false;
  for (const Prefix& candidate : PrefixCandidates(request)) {
    if (store_.HostBytes(candidate.source) < store_.SequenceBytes(candidate.source)) return true;
  }
  return false;
}

absl::StatusOr<v1::OpenSequenceResponse> SequenceRegistry::TryOpen(
    const v1::OpenSequenceRequest& request, int num_ranks, const PageGeometry& geometry,
    const Prefix& prefix, absl::Status* store_full) {
  const auto first = first_answers_.find(request.request_id());
  if (first != first_answers_.end()) return Replay(request, first->second);
  HW_RETURN_IF_ERROR(CheckCount());
  const SequenceId id = NextId();
  const absl::StatusOr<int64_t> opened =
      OpenPages({.sequence = id,
                 .fingerprint = FingerprintIdOf(request.fingerprint()),
                 .geometry = geometry,
                 .num_ranks = num_ranks,
                 .max_tokens = request.max_tokens(),
                 .prompt_tokens = request.prompt_tokens(),
                 .tenant = request.tenant(),
                 .dtype = PageDtypeOf(request.fingerprint().dtype())},
                prefix);
  if (absl::IsResourceExhausted(opened.status())) *store_full = opened.status();
  HW_RETURN_IF_ERROR(opened.status());
  CountPrefix(request, *opened);
  BoundCount();
  next_id_ = id + 1;
  Record& record = AddRecord(
      id, request, num_ranks,
      request.lease_ms() == 0 ? options_.sequence_lease : absl::Milliseconds(request.lease_ms()));
  Save(id, record);
  v1::OpenSequenceResponse& response = first_answers_[request.request_id()].response;
  response.set_prefix_tokens(*opened);
  return response;
}

PlanLayout SequenceRegistry::LayoutOf(SequenceId id, const v1::OpenSequenceRequest& request,
                                      int num_ranks) const {
  return {.sequence = id,
          .num_ranks = num_ranks,
          .num_layers = request.fingerprint().num_layers(),
          .num_kv_heads = request.fingerprint().num_kv_heads(),
          .per_kv_head = request.budget().scope() == "kv_head",
          .max_tokens = request.max_tokens(),
          .snapshot_gauge = snapshot_bytes_};
}

SequenceRegistry::Record& SequenceRegistry::AddRecord(SequenceId id,
                                                      const v1::OpenSequenceRequest& request,
                                                      int num_ranks, absl::Duration lease) {
  Record& record =
      records_.try_emplace(id, Kept(request), LayoutOf(id, request, num_ranks)).first->second;
  record.lease = lease;
  record.lease_end = record.write_end = clock_.Now() + lease;
  record.epoch = request.epoch();
  record.last_use = record.last_listed = clock_.Now();
  v1::OpenSequenceResponse response;
  response.set_sequence_id(id);
  response.set_lease_ms(absl::ToInt64Milliseconds(lease));
  first_answers_[request.request_id()] = {HashOf(request), response};
  return record;
}

absl::StatusOr<SequenceRegistry::Records::iterator> SequenceRegistry::Find(SequenceId id,
                                                                           const Viewer& viewer) {
  const auto record = records_.find(id);
  if (record == records_.end() || !viewer.Sees(record->second.request.tenant())) {
    return Unknown(id, viewer);
  }
  return record;
}

SequenceRegistry::Records::iterator SequenceRegistry::End(Records::iterator record) {
  const auto& [id, state] = *record;
  SaveEnd(id, state);
  prefixes_.Remove(id);
  if (pins_.RemoveAll(id)) PinsChanged(id);
  (void)store_.Release(id);
  ended_.push_back({id, state.request.group(), state.request.epoch(), state.num_ranks,
                    state.write_end, state.lease, state.incarnation});
  ended_requests_.push_back(state.request.request_id());
  // What is remembered of the ended is bounded like the living.
  while (static_cast<int64_t>(ended_requests_.size()) > options_.max_sequences) {
    first_answers_.erase(ended_requests_.front());
    ended_requests_.pop_front();
  }
  return records_.erase(record);
}

void SequenceRegistry::Advance(SequenceId id, Record& record) {
  record.plans.Advance(
      [&](int rank) -> std::optional<int64_t> {
        if (!store_.IsWriter(id, rank)) return std::nullopt;
        return store_.Watermark(id, rank);
      },
      ++num_advances_);
  BoundSnapshots();
}

PlanState* SequenceRegistry::OldestSnapshots() {
  std::pair<bool, uint64_t> first;
  PlanState* oldest = nullptr;
  for (auto& [id, record] : records_) {
    const auto snapshot = record.plans.oldest_snapshot();
    if (snapshot == nullptr) continue;
    const std::pair<bool, uint64_t> order = {record.suspended > absl::ZeroDuration(),
                                             snapshot->order};
    if (oldest != nullptr && order >= first) continue;
    first = order;
    oldest = &record.plans;
  }
  return oldest;
}

void SequenceRegistry::BoundSnapshots() {
  while (*snapshot_bytes_ > options_.max_snapshot_bytes) {
    PlanState* const oldest = OldestSnapshots();
    if (oldest == nullptr) return;  // somebody still reads them
    oldest->DropOldestSnapshot();
  }
}

v1::Sequence SequenceRegistry::Describe(SequenceId id, Record& record) {
  Advance(id, record);
  v1::Sequence sequence;
  sequence.set_sequence_id(id);
  sequence.set_group(record.request.group());
  sequence.set_epoch(record.request.epoch());
  sequence.set_tenant(record.request.tenant());
  *sequence.mutable_fingerprint() = record.request.fingerprint();
  *sequence.mutable_budget() = record.request.budget();
  sequence.set_prompt_tokens(record.request.prompt_tokens());
  *sequence.mutable_policy() = record.request.policy();
  sequence.set_suspended(record.suspended > absl::ZeroDuration());
  if (const auto plan = record.plans.committed(); plan != nullptr) {
    *sequence.mutable_counts() = CountSets(*plan);
    sequence.set_committed_plan(plan->number);
    sequence.set_committed_tokens(plan->tokens_seen);
  }
  sequence.set_host_bytes(store_.HostBytes(id));
  sequence.set_lease_remaining_ms(
      std::max<int64_t>(0, absl::ToInt64Milliseconds(record.lease_end - clock_.Now())));
  sequence.set_finished(record.plans.all_finished());
  sequence.set_num_tokens(static_cast<int64_t>(record.plans.tokens().size()));
  return sequence;
}

absl::StatusOr<v1::Sequence> SequenceRegistry::Get(SequenceId id, int64_t first_token,
                                                   const Viewer& viewer) {
  HW_RETURN_IF_ERROR(CheckInt("first_token", first_token, 0, std::numeric_limits<Position>::max()));
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(const Records::iterator record, Find(id, viewer));
  record->second.last_use = clock_.Now();
  v1::Sequence sequence = Describe(id, record->second);
  const std::vector<int32_t>& tokens = record->second.plans.tokens();
  const auto size = static_cast<int64_t>(tokens.size());
  const int64_t begin = std::min(first_token, size);
  const int64_t end = std::min(begin + kMaxTokensInMessage, size);
  sequence.mutable_tokens()->Add(tokens.begin() + begin, tokens.begin() + end);
  return sequence;
}

absl::StatusOr<v1::ListSequencesResponse> SequenceRegistry::List(
    const v1::ListSequencesRequest& request, const Viewer& viewer) {
  HW_RETURN_IF_ERROR(CheckInt("page_size", request.page_size(), 0, kMaxPageSize));
  HW_RETURN_IF_ERROR(CheckText("group", request.group(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckText("page_token", request.page_token(), 0, kMaxNameBytes));
  SequenceId after = 0;
  if (!request.page_token().empty() && !absl::SimpleAtoi(request.page_token(), &after)) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_token is \"", request.page_token(), "\", want one that List returned"));
  }
  const int page_size = request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  v1::ListSequencesResponse response;
  MutexLock lock(&mutex_);
  for (auto record = records_.upper_bound(after); record != records_.end(); ++record) {
    if (!viewer.Sees(record->second.request.tenant())) continue;
    if (!request.group().empty() && record->second.request.group() != request.group()) continue;
    if (response.sequences_size() == page_size) {
      response.set_next_page_token(absl::StrCat(response.sequences().rbegin()->sequence_id()));
      break;
    }
    *response.add_sequences() = Describe(record->first, record->second);
  }
  return response;
}

absl::Status SequenceRegistry::Close(const v1::CloseSequenceRequest& request,
                                     const Viewer& viewer) {
  HW_RETURN_IF_ERROR(CheckText("request_id", request.request_id(), 0, kMaxNameBytes));
  // Another tenant's with the same request id is no replay.
  std::string closed_by = request.request_id();
  if (!viewer.sees_all() && !closed_by.empty()) closed_by += absl::StrCat(" of ", viewer.tenant());
  MutexLock lock(&mutex_);
  const auto closed = closed_.find(request.sequence_id());
  if (closed != closed_.end() && !closed_by.empty() && closed->second == closed_by) {
    return absl::OkStatus();  // a replay
  }
  HW_ASSIGN_OR_RETURN(const Records::iterator record, Find(request.sequence_id(), viewer));
  SaveClosed(request.sequence_id(), closed_by);
  End(record);
  closed_[request.sequence_id()] = closed_by;
  if (static_cast<int64_t>(closed_.size()) > options_.max_sequences) {
    closed_.erase(closed_.begin());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::SequenceSet>> SequenceRegistry::GetSets(
    const v1::GetSetsRequest& request, const Viewer& viewer) {
  std::shared_ptr<const ReportedPlan> plan;
  v1::ResolvedBudget budget;
  {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(const Records::iterator record, Find(request.sequence_id(), viewer));
    const int num_layers = record->second.request.fingerprint().num_layers();
    HW_RETURN_IF_ERROR(CheckInt("number of layers", request.layers_size(), 0, num_layers));
    for (const int32_t layer : request.layers()) {
      HW_RETURN_IF_ERROR(CheckInt("layers", layer, 0, num_layers - 1));
    }
    Advance(request.sequence_id(), record->second);
    record->second.last_use = clock_.Now();
    plan = record->second.plans.committed();
    budget = record->second.request.budget();
  }
  // Before the first committed plan there is no set to show.
  if (plan == nullptr) return std::vector<v1::SequenceSet>();
  return SplitSets(*plan, budget, request.layers());
}

absl::Status SequenceRegistry::Renew(const std::string& group,
                                     const google::protobuf::RepeatedField<uint64_t>& ids,
                                     google::protobuf::RepeatedField<uint64_t>* unknown) {
  absl::Status agreement;
  MutexLock lock(&mutex_);
  for (const SequenceId id : ids) {
    const auto record = records_.find(id);
    const bool known = record != records_.end() && record->second.request.group() == group;
    // Whoever comes back after that has addresses of pages that may be others' by now.
    if (!known || record->second.stopped) {
      unknown->Add(id);
      continue;
    }
    RenewLease(record->second);
    record->second.last_listed = clock_.Now();
    if (agreement.ok()) agreement = record->second.plans.agreement();
  }
  return agreement;
}

absl::Status SequenceRegistry::ValidateReports(const v1::ReportPlanRequest& request) {
  for (const v1::PlanReport& report : request.reports()) {
    const auto record = records_.find(report.sequence_id());
    if (record == records_.end()) continue;
    if (record->second.request.group() != request.group()) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", report.sequence_id(), " belongs to group \"",
                       record->second.request.group(), "\", not to \"", request.group(), "\""));
    }
    HW_RETURN_IF_ERROR(record->second.plans.Validate(request.rank(), report));
  }
  return absl::OkStatus();
}

absl::Status SequenceRegistry::Report(const v1::ReportPlanRequest& request,
                                      google::protobuf::RepeatedField<uint64_t>* unknown) {
  absl::Status agreement;
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(ValidateReports(request));
  for (const v1::PlanReport& report : request.reports()) {
    const auto found = records_.find(report.sequence_id());
    if (found == records_.end()) {
      unknown->Add(report.sequence_id());
      continue;
    }
    Record& record = found->second;
    if (report.incarnation() != record.incarnation) continue;
    record.plans.Apply(request.rank(), report);
    SaveReport(report.sequence_id(), record, request.rank(), report);
    if (report.finished()) NoteChange(report.sequence_id());
    record.last_use = clock_.Now();
    OfferPrefix(report.sequence_id(), record);
    ++num_reports_;
    if (!record.plans.agreement().ok() && !record.disagreement_counted) {
      record.disagreement_counted = true;
      ++num_disagreements_;
    }
    if (agreement.ok()) agreement = record.plans.agreement();
    Advance(report.sequence_id(), record);
  }
  return agreement;
}

void SequenceRegistry::NoteCommit(SequenceId id) {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  if (record != records_.end()) Advance(id, record->second);
}

absl::StatusOr<SequenceRegistry::Owner> SequenceRegistry::FindOwner(SequenceId id,
                                                                    const Viewer& viewer) const {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  if (record == records_.end() || !viewer.Sees(record->second.request.tenant())) {
    return Unknown(id, viewer);
  }
  return Owner{record->second.request.group(), record->second.request.fingerprint(),
               record->second.incarnation, record->second.stopped};
}

void SequenceRegistry::RenewOne(SequenceId id) {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  if (record != records_.end()) RenewLease(record->second);
}

void SequenceRegistry::NoteUse(SequenceId id) {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  if (record != records_.end()) record->second.last_use = clock_.Now();
}

std::vector<SequenceId> SequenceRegistry::Tick() {
  std::vector<SequenceId> expired;
  MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  EndPins(now);
  for (auto record = records_.begin(); record != records_.end();) {
    if (record->second.lease_end <= now && !pins_.IsPinned(record->first)) {
      expired.push_back(record->first);
      record = End(record);
      continue;
    }
    Advance(record->first, record->second);
    StopSilent(record->first, record->second);
    ++record;
  }
  return expired;
}

// One that is kept for longer than its ranks may write by their own clocks: they have stopped, or
// have never come. Within the lock, so that none goes on with it meanwhile.
void SequenceRegistry::StopSilent(SequenceId id, Record& record) {
  if (record.stopped || WriteEndOf(record) + options_.write_grace() > clock_.Now()) return;
  record.stopped = true;
  for (int rank = 0; rank < record.num_ranks; ++rank) store_.StopWriter(id, rank);
}

std::vector<SequenceRegistry::Ended> SequenceRegistry::TakeEnded() {
  MutexLock lock(&mutex_);
  return std::exchange(ended_, {});
}

int64_t SequenceRegistry::num_sequences() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(records_.size());
}

int64_t SequenceRegistry::num_reports() const {
  MutexLock lock(&mutex_);
  return num_reports_;
}

int64_t SequenceRegistry::num_disagreements() const {
  MutexLock lock(&mutex_);
  return num_disagreements_;
}

}  // namespace heavywater
