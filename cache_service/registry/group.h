// One worker group: who is in it, who waits to enter, its epoch.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/rendezvous_board.h"
#include "heavywater/v1/cache_state.pb.h"
#include "heavywater/v1/group.pb.h"

namespace heavywater {

// Not thread safe. Callbacks never run inside; they are added to `deferred`.
//
// A group is formed when all ranks wait in Join at once. Any change of
// membership (a rank leaves, its lease ends, it joins as another process, it joins
// again naming the formation as failed) dissolves the formation: its epoch is ABORTED from then on,
// and the group forms anew, with a higher epoch, when all ranks have joined again.
class Group {
 public:
  using JoinDone = std::function<void(absl::StatusOr<v1::JoinResponse>)>;

  Group(std::string name, absl::Duration lease) : name_(std::move(name)), lease_(lease) {}

  // `epoch` is what the group gets if this completes it; true when it was taken.
  bool Join(Ticket ticket, const v1::JoinRequest& request, absl::Time now, Epoch epoch,
            JoinDone done, DeferredCalls& deferred);
  // ABORTED when the epoch is not the current formation's.
  absl::Status CheckEpoch(Epoch epoch) const;
  // Also INVALID_ARGUMENT for a rank that the group does not have.
  absl::Status CheckRank(int rank, Epoch epoch) const;
  absl::Status Renew(int rank, Epoch epoch, absl::Time now);
  absl::Status Leave(int rank, Epoch epoch, DeferredCalls& deferred);
  // Ends leases and waits that are over.
  void Tick(absl::Time now, DeferredCalls& deferred);
  void Cancel(Ticket ticket, DeferredCalls& deferred);
  void FailWaiting(const absl::Status& status, DeferredCalls& deferred);

  // Whether the rank's process has mapped the slab. Kept while the same process
  // joins again.
  void SetDirect(int rank);
  bool IsDirect(int rank) const;
  // The first epoch of the rank's process: what was opened before it had another
  // writer. 0 for no member.
  Epoch MemberSince(int rank) const;

  // Rises with every change of what a restart needs: all but leases and waits.
  int64_t revision() const { return revision_ + board_.revision(); }
  v1::GroupState ToRecord() const;
  // Of a new group; leases begin anew at `now`. DATA_LOSS.
  absl::Status Load(const v1::GroupState& record, absl::Time now);

  RendezvousBoard& board() { return board_; }
  int size() const { return common_.size(); }
  Epoch epoch() const { return epoch_; }
  bool formed() const { return formed_; }
  const v1::Fingerprint& fingerprint() const { return common_.fingerprint(); }
  int num_members() const { return static_cast<int>(members_.size()); }
  bool empty() const { return members_.empty() && joining_.empty(); }

 private:
  struct Member {
    std::string instance;
    std::string address;
    absl::Time lease_end;
    bool direct = false;
    Epoch since = 0;
  };
  struct Joining {
    Ticket ticket;
    v1::JoinRequest request;
    absl::Time deadline;
    JoinDone done;
  };

  v1::JoinResponse Response() const;
  bool AnyIsLive(absl::Time now) const;
  absl::Status AgreesWithMembers(const v1::JoinRequest& request, absl::Time now) const;
  void RenewWaiting(absl::Time now);
  void Form(Epoch epoch, absl::Time now, DeferredCalls& deferred);
  void NoteInstance(int rank, const std::string& instance);
  void Dissolve(const std::string& why, DeferredCalls& deferred);
  std::string MissingRanks() const;
  static void Answer(JoinDone done, absl::StatusOr<v1::JoinResponse> result,
                     DeferredCalls& deferred);

  const std::string name_;
  const absl::Duration lease_;
  Epoch epoch_ = 0;  // of the last formation
  bool formed_ = false;
  std::string dissolved_because_ = "it has not formed yet";
  v1::JoinRequest common_;                // what all ranks of the formation agree on
  std::map<int, Member> members_;         // of the last formation, while their leases last
  std::map<int, Joining> joining_;        // by rank
  std::map<int, std::string> instances_;  // by rank, of the last formation
  std::deque<std::string> replaced_;      // that others have taken the place of, the last ones
  RendezvousBoard board_;
  int64_t revision_ = 0;
};

}  // namespace heavywater
