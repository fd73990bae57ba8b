// All worker groups: joins, memberships, leases, rendezvous.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/registry/group.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/tier/state_store.h"
#include "heavywater/v1/cache_cluster.pb.h"
#include "heavywater/v1/group.pb.h"

namespace heavywater {

// Thread safe. Join and Wait answer through callbacks: at once on the caller's
// thread, or later on the thread of the call that ends the wait (another rank's
// Join, Put, Tick, ...), outside all locks. Each is called exactly once.
class GroupRegistry {
 public:
  using JoinDone = Group::JoinDone;
  using WaitDone = RendezvousBoard::Done;

  // The clock must outlive it. `state`: where it keeps what a restart needs, or null.
  GroupRegistry(const RegistryOptions& options, Clock& clock, StateStore* state = nullptr);

  // After a restart, before anything else. DATA_LOSS.
  absl::Status Restore();

  // For Join and Wait, so that Cancel() can name the call.
  Ticket NewTicket() { return next_ticket_++; }

  void Join(Ticket ticket, const v1::JoinRequest& request, JoinDone done);
  void Wait(Ticket ticket, const v1::WaitRequest& request, WaitDone done);
  // Ends a call that still waits with CANCELLED.
  void Cancel(Ticket ticket);
  absl::Status Put(const v1::PutRequest& request);
  absl::Status Leave(const v1::LeaveRequest& request);

  // NOT_FOUND: no such group; ABORTED: not its current epoch; INVALID_ARGUMENT:
  // no such rank.
  absl::Status Renew(const std::string& group, int rank, Epoch epoch);
  absl::Status CheckRank(const std::string& group, int rank, Epoch epoch) const;

  // The formation that `epoch` names.
  struct Formation {
    int size = 0;
    v1::Fingerprint fingerprint;
  };
  absl::StatusOr<Formation> Find(const std::string& group, Epoch epoch) const;

  // The rank's process has mapped the slab and writes into it directly.
  absl::Status SetDirect(const std::string& group, int rank, Epoch epoch);
  // As Group says.
  Epoch MemberSince(const std::string& name, int rank) const;
  bool IsDirect(const std::string& group, int rank) const;

  // Ends what is over; called several times a second.
  void Tick();
  // Ends all calls that wait, when the server drains.
  void FailWaiting(const absl::Status& status);

  // What other cache services are told.
  std::vector<v1::GroupRecord> Records() const;
  int64_t num_groups() const;
  int64_t num_ranks() const;

 private:
  absl::StatusOr<Group*> FindOrAdd(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Group*> FindLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<const Group*> FindLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Before anybody is answered.
  void Save(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RegistryOptions options_;
  Clock& clock_;
  StateStore* const state_;
  std::atomic<Ticket> next_ticket_ = 1;
  mutable Mutex mutex_;
  Epoch next_epoch_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Group> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> saved_ ABSL_GUARDED_BY(mutex_);  // revision, by name
};

}  // namespace heavywater
