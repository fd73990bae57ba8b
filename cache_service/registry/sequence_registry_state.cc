// What the sequences keep for a restart, and how they go on from it.
#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"

namespace heavywater {
namespace {

// Reports are kept as they come, and replaced by the whole once they exceed it: so each
// byte is written twice at most, in the long run.
constexpr int64_t kMinReportBytes = 4 << 20;

template <typename Message>
absl::Status Parse(std::string_view value, SequenceId id, Message* message) {
  if (value.size() <= static_cast<size_t>(std::numeric_limits<int>::max()) &&
      message->ParseFromArray(value.data(), static_cast<int>(value.size()))) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("the state of sequence ", id, " is damaged"));
}

}  // namespace

v1::SequenceState SequenceRegistry::RecordOf(const Record& record) {
  v1::SequenceState message;
  *message.mutable_request() = record.request;
  message.set_num_ranks(record.num_ranks);
  message.set_lease_ms(absl::ToInt64Milliseconds(record.lease));
  message.set_incarnation(record.incarnation);
  message.set_suspended_ms(absl::ToInt64Milliseconds(record.suspended));
  *message.mutable_plans() = record.plans.ToRecord();
  if (record.fork.has_response()) *message.mutable_fork() = record.fork;
  return message;
}

void SequenceRegistry::Save(SequenceId id, Record& record) {
  NoteChange(id);
  if (state_ == nullptr) return;
  std::string value = RecordOf(record).SerializeAsString();
  record.record_bytes = static_cast<int64_t>(value.size());
  record.report_bytes = 0;
  StateBatch batch;
  batch.Put(StateKey(StateKind::kSequence, id), std::move(value));
  if (record.num_reports > 0) batch.DeletePrefix(StateKey(StateKind::kReport, id));
  record.num_reports = 0;
  state_->Apply(batch);
}

void SequenceRegistry::SaveReport(SequenceId id, Record& record, int rank,
                                  const v1::PlanReport& report) {
  if (state_ == nullptr) return;
  v1::ReportState message;
  message.set_rank(rank);
  *message.mutable_report() = report;
  std::string value = message.SerializeAsString();
  record.report_bytes += static_cast<int64_t>(value.size());
  if (record.report_bytes > std::max(kMinReportBytes, record.record_bytes)) {
    Save(id, record);
    return;
  }
  StateBatch batch;
  batch.Put(StateKey(StateKind::kReport, id, record.num_reports++), std::move(value));
  state_->Apply(batch);
}

void SequenceRegistry::SaveEnd(SequenceId id, const Record& record) {
  NoteChange(id);
  if (state_ == nullptr) return;
  v1::RetiringState retiring;
  retiring.set_group(record.request.group());
  retiring.set_epoch(record.request.epoch());
  retiring.set_num_ranks(record.num_ranks);
  retiring.set_lease_ms(absl::ToInt64Milliseconds(record.lease));
  StateBatch batch;
  batch.Put(StateKey(StateKind::kRetiring, id), retiring.SerializeAsString());
  batch.Delete(StateKey(StateKind::kSequence, id));
  batch.DeletePrefix(StateKey(StateKind::kReport, id));
  state_->Apply(batch);
}

void SequenceRegistry::SaveClosed(SequenceId id, const std::string& request_id) {
  if (state_ == nullptr || request_id.empty()) return;
  StateBatch batch;
  batch.Put(StateKey(StateKind::kClosed, id), request_id);
  if (static_cast<int64_t>(closed_.size()) >= options_.max_sequences) {
    batch.Delete(StateKey(StateKind::kClosed, closed_.begin()->first));
  }
  state_->Apply(batch);
}

absl::Status SequenceRegistry::LoadSequence(SequenceId id, std::string_view value) {
  v1::SequenceState message;
  HW_RETURN_IF_ERROR(Parse(value, id, &message));
  if (message.num_ranks() < 1 || message.num_ranks() > kMaxRanks || message.lease_ms() < 1 ||
      message.lease_ms() > kMaxLeaseMs) {
    return absl::DataLossError(absl::StrCat("the state of sequence ", id, ": impossible sizes"));
  }
  Record& record =
      AddRecord(id, message.request(), message.num_ranks(), absl::Milliseconds(message.lease_ms()));
  record.incarnation = message.incarnation();
  record.suspended = absl::Milliseconds(message.suspended_ms());
  record.lease_end += record.suspended;
  // Which processes had it before, and until when they may write, is not known any more.
  if (record.incarnation > 0) record.earlier_write_ends[0] = record.write_end;
  record.record_bytes = static_cast<int64_t>(value.size());
  record.fork = message.fork();
  if (record.fork.has_response()) RememberFork(record);
  next_id_ = std::max(next_id_, id + 1);
  store_.SetOwner(id, record.request.tenant(), PageDtypeOf(record.request.fingerprint().dtype()));
  return record.plans.Load(message.plans());
}

absl::Status SequenceRegistry::LoadReport(SequenceId id, std::string_view value) {
  v1::ReportState message;
  HW_RETURN_IF_ERROR(Parse(value, id, &message));
  const auto found = records_.find(id);
  if (found == records_.end()) {
    return absl::DataLossError(
        absl::StrCat("the state has a report of sequence ", id, ", but not the sequence"));
  }
  Record& record = found->second;
  if (const absl::Status valid = record.plans.Validate(message.rank(), message.report());
      !valid.ok()) {
    return absl::DataLossError(absl::StrCat("the state of sequence ", id, ": ", valid.message()));
  }
  record.plans.Apply(message.rank(), message.report());
  record.report_bytes += static_cast<int64_t>(value.size());
  ++record.num_reports;
  // As when it came: what was stored then is stored now.
  Advance(id, record);
  return absl::OkStatus();
}

absl::Status SequenceRegistry::Restore(const std::vector<SequenceId>& stored) {
  MutexLock lock(&mutex_);
  const auto each = [this](StateKind kind, auto load) {
    return state_->ForEach(StateKey(kind),
                           [&](std::string_view key, std::string_view value) -> absl::Status {
                             const absl::StatusOr<StateId> id = ParseStateKey(key);
                             return id.ok() ? load(id->id, value) : id.status();
                           });
  };
  HW_RETURN_IF_ERROR(each(StateKind::kSequence, [&](SequenceId id, std::string_view value)
                                                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                                      return LoadSequence(id, value);
                                                    }));
  HW_RETURN_IF_ERROR(each(StateKind::kReport, [&](SequenceId id, std::string_view value)
                                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                                    return LoadReport(id, value);
                                                  }));
  HW_RETURN_IF_ERROR(each(StateKind::kClosed, [&](SequenceId id, std::string_view value)
                                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                                                    closed_[id] = std::string(value);
                                                    return absl::OkStatus();
                                                  }));
  // The process ended between the record of an end, or of a beginning, and that of its
  // pages.
  const std::set<SequenceId> with_pages(stored.begin(), stored.end());
  for (const SequenceId id : stored) {
    if (!records_.contains(id)) (void)store_.Release(id);
  }
  for (auto record = records_.begin(); record != records_.end();) {
    if (!with_pages.contains(record->first)) {
      record = End(record);
      continue;
    }
    OfferPrefix(record->first, record->second);
    ++record;
  }
  return LoadPins();
}

}  // namespace heavywater
