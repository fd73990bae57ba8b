// Who wants which sequences to stay where they are, and until when.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"

namespace heavywater {

struct Pin {
  SequenceId sequence = 0;
  std::string owner;
  absl::Time deadline;
};

// Not thread safe: the sequence registry holds its mutex around every call.
class PinBook {
 public:
  explicit PinBook(int64_t max_pins) : max_pins_(max_pins) {}

  // A new one, or the owner's anew. RESOURCE_EXHAUSTED naming the limit.
  absl::Status Set(const Pin& pin);
  bool Remove(SequenceId sequence, const std::string& owner);  // whether it was there
  bool RemoveAll(SequenceId sequence);                         // whether there were any
  // Those whose deadline has come, taken out.
  std::vector<Pin> TakeExpired(absl::Time now);

  bool IsPinned(SequenceId sequence) const { return pins_.contains(sequence); }
  std::vector<Pin> PinsOf(SequenceId sequence) const;
  std::vector<SequenceId> Sequences() const;
  int64_t num_pins() const { return num_pins_; }

 private:
  using Owners = std::map<std::string, absl::Time>;

  const int64_t max_pins_;
  std::map<SequenceId, Owners> pins_;  // none is empty
  int64_t num_pins_ = 0;
};

}  // namespace heavywater
