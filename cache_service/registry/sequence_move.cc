// Sequences that go from one cache service to another.
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"

namespace heavywater {

// The next one of this service's slot that is not here: an imported one keeps its id.
SequenceId SequenceRegistry::NextId() const {
  const uint64_t stride = options_.id_stride;
  SequenceId id = next_id_ + (options_.id_slot + stride - next_id_ % stride) % stride;
  while (records_.contains(id)) id += stride;
  return id;
}

std::optional<SequenceRegistry::Exported> SequenceRegistry::Export(SequenceId id, bool with_state) {
  MutexLock lock(&mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return std::nullopt;
  Record& record = found->second;
  Advance(id, record);
  absl::Time lease_end = record.lease_end;
  for (const heavywater::Pin& pin : pins_.PinsOf(id)) {
    lease_end = std::max(lease_end, pin.deadline);
  }
  Exported exported = {
      .group = record.request.group(),
      .tenant = record.request.tenant(),
      .request_id = record.request.request_id(),
      .incarnation = record.incarnation,
      .num_tokens = static_cast<int64_t>(record.plans.tokens().size()),
      .suspended = record.suspended > absl::ZeroDuration(),
      .finished = record.plans.all_finished(),
      .can_go_on = record.plans.agreement().ok() &&
                   record.plans.FindSnapshot(std::numeric_limits<int64_t>::max()) != nullptr,
      .lease_end = lease_end};
  if (with_state) exported.state = RecordOf(record);
  return exported;
}

bool SequenceRegistry::IsOwnId(SequenceId id) const {
  MutexLock lock(&mutex_);
  return id >= options_.first_sequence_id && id < next_id_ &&
         id % options_.id_stride == options_.id_slot;
}

std::vector<SequenceId> SequenceRegistry::Ids() const {
  MutexLock lock(&mutex_);
  std::vector<SequenceId> ids;
  ids.reserve(records_.size());
  for (const auto& [id, record] : records_) ids.push_back(id);
  return ids;
}

absl::Status SequenceRegistry::Import(SequenceId id, const v1::SequenceState& state,
                                      absl::Time lease_end) {
  MutexLock lock(&mutex_);
  if (records_.contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", id, " is here already"));
  }
  v1::SequenceState own = state;
  // No group's yet, and older than every formation here: no rank's word of it counts before it
  // has it open.
  own.mutable_request()->clear_group();
  own.mutable_request()->set_epoch(0);
  // Its pages may have been stored at 8 bits, which a copy does not tell: nobody begins with them.
  own.mutable_request()->clear_prefix();
  const SequenceId next_id = next_id_;
  const absl::Status loaded = LoadSequence(id, own.SerializeAsString());
  next_id_ = next_id;  // the id is of another service's numbers
  if (!loaded.ok()) {
    records_.erase(id);
    return loaded;
  }
  Record& record = records_.at(id);
  record.lease_end = lease_end;
  // Nobody has written to it here.
  record.write_end = absl::InfinitePast();
  record.earlier_write_ends.clear();
  BoundSnapshots();
  Save(id, record);
  if (state_ != nullptr) {  // of a life that it had here before
    StateBatch before;
    before.Delete(StateKey(StateKind::kRetiring, id));
    state_->Apply(before);
  }
  return absl::OkStatus();
}

bool SequenceRegistry::GiveUp(SequenceId id) {
  MutexLock lock(&mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return false;
  End(found);
  return true;
}

}  // namespace heavywater
