// A group goes on with a sequence after a failure.
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

constexpr size_t kMaxSnapshotPart = size_t{1} << 20;
// Of any registry, for a write that is under way when its rank's time is over.
constexpr absl::Duration kMaxWriteGrace = absl::Minutes(10);

template <typename Value>
absl::Status CheckSame(const char* field, const Value& got, const Value& opened) {
  if (got == opened) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(field, " is \"", got, "\", the sequence was opened with \"", opened, "\""));
}

// A field that only a later build knows is as good as absent where it has its default.
template <typename Message>
absl::Status CheckEquivalent(const char* field, const Message& got, const Message& opened) {
  google::protobuf::util::MessageDifferencer differencer;
  differencer.set_message_field_comparison(google::protobuf::util::MessageDifferencer::EQUIVALENT);
  if (differencer.Compare(opened, got)) return absl::OkStatus();
  return CheckSame(field, got.ShortDebugString(), opened.ShortDebugString());
}

using Tokens = google::protobuf::RepeatedField<int32_t>;

// How many of the first tokens are the same.
int64_t CommonTokens(const Tokens& got, const std::vector<int32_t>& known) {
  const auto count = std::min(static_cast<int64_t>(got.size()), static_cast<int64_t>(known.size()));
  return std::mismatch(known.begin(), known.begin() + count, got.begin()).first - known.begin();
}

// The first `count` tokens, as far as both have them.
absl::Status CheckTokens(const Tokens& got, const std::vector<int32_t>& known, int64_t count) {
  const int64_t common = CommonTokens(got, known);
  if (common >= count || common == got.size() || common == static_cast<int64_t>(known.size())) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("tokens[", common, "] is ",
                                                    got[static_cast<int>(common)],
                                                    ", the sequence has ", known[common]));
}

}  // namespace

absl::Status SequenceRegistry::CheckReopen(const v1::ReopenSequenceRequest& request, int num_ranks,
                                           SequenceId id, const Record& record) {
  const v1::OpenSequenceRequest& opened = record.request;
  // One that came from another cache service is of whichever group asks first.
  if (!opened.group().empty()) {
    HW_RETURN_IF_ERROR(CheckSame("group", request.group(), opened.group()));
  }
  HW_RETURN_IF_ERROR(CheckSame("number of ranks", num_ranks, record.num_ranks));
  if (!request.extends()) {
    HW_RETURN_IF_ERROR(CheckSame("max_tokens", request.max_tokens(), opened.max_tokens()));
  }
  HW_RETURN_IF_ERROR(CheckSame("prompt_tokens", request.prompt_tokens(), opened.prompt_tokens()));
  HW_RETURN_IF_ERROR(CheckEquivalent("policy", request.policy(), opened.policy()));
  HW_RETURN_IF_ERROR(CheckEquivalent("budget", request.budget(), opened.budget()));
  // A turn may go on otherwise after the prompt.
  HW_RETURN_IF_ERROR(
      CheckTokens(request.tokens(), record.plans.tokens(),
                  request.extends() ? request.prompt_tokens() : request.tokens_size()));
  if (!record.plans.agreement().ok()) {
    return absl::DataLossError(record.plans.agreement().message());
  }
  return absl::OkStatus();
}

// Whose processes wrote so far may be others than those that go on: one that stood still
// writes on when it wakes, until its time is over.
void SequenceRegistry::NoteReopened(const v1::ReopenSequenceRequest& request, Record& record) {
  const absl::Time now = clock_.Now();
  absl::Time& write_end = record.earlier_write_ends[record.epoch];
  write_end = std::max(write_end, record.write_end);
  std::erase_if(record.earlier_write_ends,
                [&](const auto& one) { return one.second + kMaxWriteGrace <= now; });
  record.epoch = request.epoch();
  ++record.incarnation;
  record.suspended = absl::ZeroDuration();
  record.stopped = false;
  record.lease_end = record.write_end = now + record.lease;
  record.last_use = record.last_listed = now;
}

absl::Time SequenceRegistry::EarlierWriteEnd(SequenceId id, Epoch since) const {
  MutexLock lock(&mutex_);
  absl::Time end = absl::InfinitePast();
  const auto record = records_.find(id);
  if (record == records_.end()) return end;
  for (const auto& [epoch, write_end] : record->second.earlier_write_ends) {
    if (epoch < since) end = std::max(end, write_end);
  }
  return end;
}

absl::Time SequenceRegistry::WriteEnd(SequenceId id) const {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  return record == records_.end() ? absl::InfinitePast() : WriteEndOf(record->second);
}

absl::Time SequenceRegistry::WriteEndOf(const Record& record) {
  absl::Time end = record.write_end;
  for (const auto& [epoch, write_end] : record.earlier_write_ends) end = std::max(end, write_end);
  return end;
}

std::vector<std::pair<SequenceId, absl::Time>> SequenceRegistry::WriteEnds() const {
  std::vector<std::pair<SequenceId, absl::Time>> ends;
  MutexLock lock(&mutex_);
  for (const auto& [id, record] : records_) ends.emplace_back(id, record.write_end);
  return ends;
}

// Before the record says that it goes on: a restart between the two finds more than it needs.
absl::Status SequenceRegistry::ContestReplaced(SequenceId id, const Record& record,
                                               std::span<const Epoch> since, int64_t tokens) {
  for (size_t rank = 0; rank < since.size(); ++rank) {
    // 0: its group has just gone, and comes back with whichever process.
    if (since[rank] > 0 && since[rank] <= record.epoch) continue;
    HW_RETURN_IF_ERROR(store_.Contest(id, static_cast<int>(rank), tokens));
  }
  return absl::OkStatus();
}

std::vector<SequenceRegistry::FinishedRank> SequenceRegistry::FinishedRanks() const {
  std::vector<FinishedRank> finished;
  MutexLock lock(&mutex_);
  for (const auto& [id, record] : records_) {
    for (int rank = 0; rank < record.num_ranks; ++rank) {
      if (!record.plans.is_finished(rank)) continue;
      finished.push_back({id, rank, record.incarnation, record.write_end});
    }
  }
  return finished;
}

bool SequenceRegistry::HasFinished(SequenceId id, int rank) const {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  return record != records_.end() && record->second.plans.is_finished(rank);
}

absl::StatusOr<v1::ReopenSequenceResponse> SequenceRegistry::Reopen(
    const v1::ReopenSequenceRequest& request, std::span<const Epoch> since, int32_t incarnation) {
  MutexLock lock(&mutex_);
  const SequenceId id = request.sequence_id();
  HW_RETURN_IF_ERROR(
      CheckInt("max_tokens", request.max_tokens(), 1, std::numeric_limits<Position>::max()));
  // To other tenants it is as if it were not there.
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(id, Viewer::Tenant(request.tenant())));
  Record& record = found->second;
  if (record.incarnation != incarnation || record.epoch > request.epoch()) {
    return absl::AbortedError(absl::StrCat("sequence ", id, " went on with incarnation ",
                                           record.incarnation, " of epoch ", record.epoch,
                                           " while its pages were brought up, want ", incarnation,
                                           " and at most ", request.epoch()));
  }
  HW_RETURN_IF_ERROR(CheckReopen(request, static_cast<int>(since.size()), id, record));
  Advance(id, record);
  int64_t known = CommonTokens(request.tokens(), record.plans.tokens());
  const int64_t most =
      request.extends() ? std::min(request.max_tokens_seen(), known) : request.max_tokens_seen();
  const auto snapshot = record.plans.FindSnapshot(most);
  if (snapshot == nullptr) {
    return absl::DataLossError(
        absl::StrCat("sequence ", id, " has no committed state of ", most, " tokens or fewer"));
  }
  // What was given up behind the state is taken in again, as text that is not known.
  known = std::max(std::min(known, record.plans.first_dropped()), snapshot->tokens_seen);
  HW_RETURN_IF_ERROR(ContestReplaced(id, record, since, known));
  // The ranks read its pages in place, as soon as there is room for it on the devices. Last of
  // what may fail: they stay from then on.
  HW_RETURN_IF_ERROR(
      store_.Extend(id, std::max(request.max_tokens(), record.request.max_tokens())));
  record.plans.GoBackTo(snapshot->plan, known);
  if (request.max_tokens() > record.request.max_tokens()) {
    record.request.set_max_tokens(request.max_tokens());
    record.plans.Extend(request.max_tokens());
  }
  record.request.set_group(request.group());
  NoteReopened(request, record);
  Save(id, record);
  // After the record: a restart between the two finds more than it needs. What lies behind
  // the known tokens is written anew.
  HW_RETURN_IF_ERROR(store_.Truncate(id, known));
  v1::ReopenSequenceResponse response;
  response.set_lease_ms(absl::ToInt64Milliseconds(record.lease));
  response.set_plan(snapshot->plan);
  response.set_tokens_seen(snapshot->tokens_seen);
  response.set_incarnation(record.incarnation);
  response.set_known_tokens(known);
  return response;
}

bool SequenceRegistry::IsCurrent(SequenceId id, int32_t incarnation) const {
  MutexLock lock(&mutex_);
  const auto record = records_.find(id);
  return record != records_.end() && record->second.incarnation == incarnation;
}

absl::StatusOr<v1::ReadSnapshotResponse> SequenceRegistry::ReadSnapshot(
    const v1::ReadSnapshotRequest& request) {
  std::shared_ptr<const CommittedSnapshot> snapshot;
  {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(request.sequence_id()));
    snapshot = found->second.plans.SnapshotOfPlan(request.plan());
  }
  if (snapshot == nullptr) {
    return absl::NotFoundError(absl::StrCat("sequence ", request.sequence_id(),
                                            " has no committed state of plan ", request.plan()));
  }
  HW_RETURN_IF_ERROR(
      CheckInt("rank", request.rank(), 0, static_cast<int64_t>(snapshot->parts.size()) - 1));
  const std::string& part = snapshot->parts[static_cast<size_t>(request.rank())];
  HW_RETURN_IF_ERROR(CheckInt("offset", request.offset(), 0, static_cast<int64_t>(part.size())));
  v1::ReadSnapshotResponse response;
  response.set_total_bytes(static_cast<int64_t>(part.size()));
  response.set_data(part.substr(static_cast<size_t>(request.offset()), kMaxSnapshotPart));
  return response;
}

}  // namespace heavywater
