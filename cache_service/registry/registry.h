// The registry as a whole: groups and sequences, tied to each other and to the
// page store. What the gRPC handlers call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/registry/group_registry.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/tenant_quotas.h"
#include "cache_service/tier/page_store.h"
#include "heavywater/v1/group.pb.h"
#include "heavywater/v1/sequence.pb.h"

namespace heavywater {

// Thread safe.
class Registry {
 public:
  // The store, the clock and the state (where it keeps what a restart needs; may be
  // null) must outlive it.
  Registry(const RegistryOptions& options, PageStore& store, Clock& clock,
           StateStore* state = nullptr);

  // After a restart, before anything else. `live`, `retiring`: the sequences whose pages
  // the store has taken over. DATA_LOSS.
  absl::Status Restore(const std::vector<SequenceId>& live,
                       const std::vector<SequenceId>& retiring);

  GroupRegistry& groups() { return groups_; }
  SequenceRegistry& sequences() { return sequences_; }
  TenantQuotas& quotas() { return quotas_; }

  // FAILED_PRECONDITION when the fingerprint is not the group's.
  absl::StatusOr<v1::OpenSequenceResponse> Open(const v1::OpenSequenceRequest& request);
  // `is_cancelled`: whether its caller has gone, asked after what may have taken long; null:
  // it never has. CANCELLED, and ABORTED where others were faster: nothing has changed.
  absl::StatusOr<v1::ReopenSequenceResponse> Reopen(
      const v1::ReopenSequenceRequest& request,
      const std::function<bool()>& is_cancelled = nullptr);
  absl::StatusOr<v1::HeartbeatResponse> Heartbeat(const v1::HeartbeatRequest& request);
  absl::StatusOr<v1::ReportPlanResponse> ReportPlan(const v1::ReportPlanRequest& request);

  // The rank will map the slab and write into it.
  absl::Status AttachDirect(const std::string& group, int rank, Epoch epoch);
  // The rank may write to the sequence now; whether it does so in the slab.
  // NOT_FOUND: sequence; ABORTED: epoch.
  absl::StatusOr<bool> CheckWriter(SequenceId sequence, int rank, Epoch epoch) const;
  // Likewise, and renews the sequence's lease: the rank is to get pages.
  absl::StatusOr<bool> AdmitWriter(SequenceId sequence, int rank, Epoch epoch);
  // After its reservation: where the rank has said meanwhile that it writes no more, it does not.
  void StopIfFinished(SequenceId id, int rank);

  // Ends leases and waits that are over, reclaims pages; called several times a
  // second. Returns the sequences whose leases ended.
  std::vector<SequenceId> Tick();

 private:
  // An ended sequence whose pages ranks may still be writing in the slab.
  struct Retiring {
    std::string group;
    Epoch epoch = 0;  // in which it was opened
    int num_ranks = 0;
    absl::Time deadline;
    int32_t incarnation = 0;        // at its end; kUnknownIncarnation
    uint64_t answers = 0;           // to heartbeats, before the end was noticed
    std::map<int, int> heard = {};  // of ranks of earlier versions: heartbeats since the end
  };

  // Of a sequence that may be contested in the store.
  struct Contest {
    int reopens = 0;                        // under way: they may contest it at any moment
    absl::Time end = absl::InfinitePast();  // when no process that was replaced writes any more
  };

  bool CanRead(const std::string& group, int size) const;
  absl::Status LoadRetiring(const std::vector<SequenceId>& retiring)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CollectEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whoever has the sequence (or had it at its end) says that it writes no more.
  void NoteFinished(const v1::ReportPlanRequest& request, const v1::PlanReport& report);
  // Now, or once no process that was replaced writes any more.
  void StopFinished(SequenceId id, int rank, int32_t incarnation, Epoch since);
  bool IsOfItsEnd(const v1::ReportPlanRequest& request, const v1::PlanReport& report);
  // What may have changed while its pages came up has been checked.
  absl::StatusOr<v1::ReopenSequenceResponse> GoOn(const v1::ReopenSequenceRequest& request,
                                                  const std::vector<Epoch>& since,
                                                  int32_t incarnation);
  std::vector<Epoch> MembersSince(const std::string& group, int size) const;
  void EndContests() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next one.
  std::map<SequenceId, Contest>::iterator EndContestIfOver(
      std::map<SequenceId, Contest>::iterator contest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopLater() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // HeartbeatResponse.number.
  uint64_t StopWriters(const v1::HeartbeatRequest& request);
  bool SentAfterEnd(const v1::HeartbeatRequest& request, Retiring& retiring) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RegistryOptions options_;
  PageStore& store_;
  Clock& clock_;
  StateStore* const state_;
  GroupRegistry groups_;
  SequenceRegistry sequences_;
  TenantQuotas quotas_;
  Mutex mutex_;
  // Ranks that write no more, while processes which they have replaced still may: believed
  // at that time, if the sequence has not gone on by then.
  struct LateStop {
    int32_t incarnation = 0;
    absl::Time at;
  };
  std::map<std::pair<SequenceId, int>, LateStop> late_stops_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, Retiring> retiring_ ABSL_GUARDED_BY(mutex_);
  // The number of the last answer to a heartbeat. Of the time of the start on, so that one of the
  // service before its restart is smaller.
  uint64_t answers_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, Contest> contests_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
