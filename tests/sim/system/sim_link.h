// A rank's tie to the cache service, as worker/server/cache_link.h has it, over simulated
// messages and time: membership, heartbeats, which sequences are listed in them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "cache_service/base/ids.h"
#include "heavywater/v1/group.pb.h"
#include "tests/sim/system/sim_service.h"
#include "tests/sim/system/sim_world.h"

namespace heavywater {

struct SimLinkOptions {
  int rank = 0;
  int size = 1;
  std::string instance;
  v1::Fingerprint fingerprint;
};

inline constexpr char kSimGroup[] = "group";

class SimLink {
 public:
  // All outlive this; `caller` is the process.
  SimLink(SimWorld& world, SimService& service, SimCallerPtr caller, SimLinkOptions options);

  // Joins until it has joined, then sends heartbeats. `failed`: the formation given up.
  void Join(Epoch failed);
  void StopHeartbeats() { ++loop_; }

  Epoch epoch() const { return epoch_; }
  bool joined() const { return joined_; }  // since the last Join()
  const SimLinkOptions& options() const { return options_; }
  const SimCallerPtr& caller() const { return caller_; }

  void AddSequence(SequenceId sequence, absl::Time renewed = absl::InfinitePast());
  void RemoveSequence(SequenceId sequence);
  void ForgetSequence(SequenceId sequence) { sequences_.erase(sequence); }
  absl::Time RenewedAt(SequenceId sequence) const;
  void NoteRenewed(SequenceId sequence, absl::Time sent);
  bool Lists(SequenceId sequence) const { return sequences_.contains(sequence); }

  std::function<void()> on_joined = [] {};
  std::function<void(SequenceId)> on_unknown = [](SequenceId) {};
  std::function<void(SequenceId, const v1::HeartbeatResponse&)> on_suspended =
      [](SequenceId, const v1::HeartbeatResponse&) {};

 private:
  struct Listed {
    int count = 0;
    absl::Time renewed = absl::InfinitePast();
    absl::Time since = absl::InfinitePast();
  };

  void JoinOnce(absl::Duration timeout, Epoch failed, bool again);
  void Beat();
  void HandleBeat(const v1::HeartbeatRequest& request, absl::Time sent,
                  const absl::StatusOr<v1::HeartbeatResponse>& result);

  SimWorld& world_;
  SimService& service_;
  const SimCallerPtr caller_;
  const SimLinkOptions options_;
  Epoch epoch_ = 0;
  uint64_t answered_number_ = 0;
  bool joined_ = false;
  uint64_t loop_ = 0;  // of heartbeats or joins: what an earlier one hears is of no use
  uint64_t beats_ = 0;
  absl::Duration interval_ = absl::Seconds(1);
  std::map<SequenceId, Listed> sequences_;
};

}  // namespace heavywater
