#include "cache_service/registry/pin_book.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"

namespace heavywater {

absl::Status PinBook::Set(const Pin& pin) {
  const auto owners = pins_.find(pin.sequence);
  const bool is_new = owners == pins_.end() || !owners->second.contains(pin.owner);
  if (is_new && num_pins_ >= max_pins_) {
    return ExhaustedError(
        absl::StrCat("there are ", num_pins_, " pins, the limit max_pins is ", max_pins_),
        {.subject = "max_pins", .need = 1, .limit = max_pins_, .retry_after = absl::Seconds(1)});
  }
  pins_[pin.sequence][pin.owner] = pin.deadline;
  num_pins_ += is_new ? 1 : 0;
  return absl::OkStatus();
}

bool PinBook::Remove(SequenceId sequence, const std::string& owner) {
  const auto owners = pins_.find(sequence);
  if (owners == pins_.end() || owners->second.erase(owner) == 0) return false;
  --num_pins_;
  if (owners->second.empty()) pins_.erase(owners);
  return true;
}

bool PinBook::RemoveAll(SequenceId sequence) {
  const auto owners = pins_.find(sequence);
  if (owners == pins_.end()) return false;
  num_pins_ -= static_cast<int64_t>(owners->second.size());
  pins_.erase(owners);
  return true;
}

std::vector<Pin> PinBook::TakeExpired(absl::Time now) {
  std::vector<Pin> expired;
  for (const auto& [sequence, owners] : pins_) {
    for (const auto& [owner, deadline] : owners) {
      if (deadline <= now) expired.push_back({sequence, owner, deadline});
    }
  }
  for (const Pin& pin : expired) Remove(pin.sequence, pin.owner);
  return expired;
}

std::vector<Pin> PinBook::PinsOf(SequenceId sequence) const {
  std::vector<Pin> pins;
  const auto owners = pins_.find(sequence);
  if (owners == pins_.end()) return pins;
  for (const auto& [owner, deadline] : owners->second) pins.push_back({sequence, owner, deadline});
  return pins;
}

std::vector<SequenceId> PinBook::Sequences() const {
  std::vector<SequenceId> sequences;
  for (const auto& [sequence, owners] : pins_) sequences.push_back(sequence);
  return sequences;
}

}  // namespace heavywater
