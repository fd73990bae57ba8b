// Sequences that somebody has pinned, and those that a drain waits for.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {

namespace {

constexpr int64_t kMaxPinMs = int64_t{30} * 24 * 3'600'000;

absl::Status CheckPin(const v1::PinRequest& request) {
  HW_RETURN_IF_ERROR(CheckText("owner", request.owner(), 1, kMaxNameBytes));
  if (request.unpin()) return CheckInt("ttl_ms with unpin", request.ttl_ms(), 0, 0);
  return CheckInt("ttl_ms", request.ttl_ms(), 1, kMaxPinMs);
}

}  // namespace

int64_t SequenceRegistry::KeptBytes(SequenceId with) const {
  std::vector<SequenceId> ids;
  for (const auto& [id, record] : records_) {
    const bool kept = record.suspended > absl::ZeroDuration() || pins_.IsPinned(id);
    if (id == with || kept) ids.push_back(id);
  }
  return store_.HostBytesTogether(ids);
}

absl::Status SequenceRegistry::CheckKept(SequenceId id, const char* what) const {
  const int64_t held = KeptBytes(id);
  if (held <= options_.max_suspended_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " would hold ", held, " bytes of host memory with sequence ", id,
                   ", want at most ", options_.max_suspended_bytes));
}

absl::StatusOr<v1::PinResponse> SequenceRegistry::Pin(const v1::PinRequest& request) {
  HW_RETURN_IF_ERROR(CheckPin(request));
  const SequenceId id = request.sequence_id();
  MutexLock lock(&mutex_);
  HW_RETURN_IF_ERROR(Find(id).status());
  if (request.unpin()) {
    if (!pins_.Remove(id, request.owner())) {
      return absl::NotFoundError(
          absl::StrCat("sequence ", id, " has no pin of owner \"", request.owner(), "\""));
    }
  } else {
    if (!pins_.IsPinned(id)) HW_RETURN_IF_ERROR(CheckKept(id, "pinned and suspended sequences"));
    HW_RETURN_IF_ERROR(
        pins_.Set({id, request.owner(), clock_.Now() + absl::Milliseconds(request.ttl_ms())}));
  }
  PinsChanged(id);
  v1::PinResponse response;
  response.set_pins(static_cast<int64_t>(pins_.PinsOf(id).size()));
  response.set_host_bytes(store_.HostBytes(id));
  response.set_lower_bytes(store_.SequenceBytes(id) - store_.HostBytes(id));
  return response;
}

void SequenceRegistry::PinsChanged(SequenceId id) {
  store_.SetPinned(id, pins_.IsPinned(id));
  NoteChange(id);  // others keep what is lost of it until its last pin ends
  if (state_ == nullptr) return;
  v1::PinsState message;
  for (const heavywater::Pin& pin : pins_.PinsOf(id)) {
    v1::PinsState::Pin& kept = *message.add_pins();
    kept.set_owner(pin.owner);
    kept.set_deadline_unix_ms(absl::ToUnixMillis(pin.deadline));
  }
  StateBatch batch;
  const std::string key = StateKey(StateKind::kPins, id);
  if (message.pins().empty()) {
    batch.Delete(key);
  } else {
    batch.Put(key, message.SerializeAsString());
  }
  state_->Apply(batch);
}

void SequenceRegistry::EndPins(absl::Time now) {
  for (heavywater::Pin& pin : pins_.TakeExpired(now)) {
    PinsChanged(pin.sequence);
    if (ended_pins_.size() < kMaxEndedPins) ended_pins_.push_back(std::move(pin));
  }
}

absl::Status SequenceRegistry::LoadPins() {
  StateBatch gone;
  HW_RETURN_IF_ERROR(state_->ForEach(
      StateKey(StateKind::kPins),
      [&](std::string_view key, std::string_view value)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
            HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
            v1::PinsState message;
            if (!message.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
              return absl::DataLossError(
                  absl::StrCat("the state of the pins of sequence ", id.id, " is damaged"));
            }
            if (!records_.contains(id.id)) {
              gone.Delete(std::string(key));
              return absl::OkStatus();
            }
            for (const v1::PinsState::Pin& pin : message.pins()) {
              // What a lower max_pins leaves no place for is pinned no more.
              (void)pins_.Set({id.id, pin.owner(), absl::FromUnixMillis(pin.deadline_unix_ms())});
            }
            store_.SetPinned(id.id, pins_.IsPinned(id.id));
            return absl::OkStatus();
          }));
  if (!gone.empty()) state_->Apply(gone);
  return absl::OkStatus();
}

std::vector<heavywater::Pin> SequenceRegistry::TakeEndedPins() {
  MutexLock lock(&mutex_);
  return std::exchange(ended_pins_, {});
}

SequenceRegistry::Pinned SequenceRegistry::CountPinned() const {
  MutexLock lock(&mutex_);
  Pinned pinned = {.pins = pins_.num_pins()};
  for (const SequenceId id : pins_.Sequences()) {
    ++pinned.sequences;
    pinned.host_bytes += store_.HostBytes(id);
  }
  return pinned;
}

std::vector<SequenceId> SequenceRegistry::Running() const {
  std::vector<SequenceId> running;
  MutexLock lock(&mutex_);
  for (const auto& [id, record] : records_) {
    if (record.plans.all_finished() || record.suspended > absl::ZeroDuration()) continue;
    running.push_back(id);
  }
  return running;
}

SequenceRegistry::Written SequenceRegistry::SaveAll() {
  Written written;
  std::vector<SequenceId> ids;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, record] : records_) ids.push_back(id);
  }
  // One after the other, so that nobody waits for all of them.
  for (const SequenceId id : ids) {
    MutexLock lock(&mutex_);
    const auto found = records_.find(id);
    if (found == records_.end()) continue;
    Advance(id, found->second);
    Save(id, found->second);
    ++written.sequences;
    written.bytes += found->second.record_bytes;
  }
  return written;
}

}  // namespace heavywater
