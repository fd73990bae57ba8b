// This rank's tie to the cache service: channel, membership of its group,
// heartbeats. An outage of the service stops nothing here; it is noticed, and
// the rank joins again when the service is back, or, where there are several
// services and it stays away, at another one.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/common.pb.h"
#include "worker/server/cache_choice.h"
#include "worker/server/service_stubs.h"
#include "worker/server/stop_flag.h"

namespace heavywater {

// How a call ends when the service is away: down, stopping, or too slow.
bool ServiceIsAway(const absl::Status& status);

// Of a channel to the cache service: connects again within a second of its return.
grpc::ChannelArguments CacheChannelArguments();

struct CacheAddress {
  std::string address = {};
  std::shared_ptr<grpc::Channel> channel = nullptr;  // to it; null: one in plaintext
};

struct CacheLinkOptions {
  std::vector<CacheAddress> services = {};  // one or more; CacheChoice says which is used
  absl::Duration failover = absl::InfiniteDuration();  // its patience
  std::string group = "default";
  int rank = 0;
  int size = 1;
  std::string instance = {};            // unique per process
  std::string advertised_address = {};  // of this rank
  v1::Fingerprint fingerprint = {};
  std::string config_digest = {};  // hash and text of what must be equal on all ranks
  absl::Duration join_timeout = absl::Seconds(30);  // of one try
  Clock* clock = &Clock::Real();                    // that leases are measured with
};

// What the service has last said of its host memory (HeartbeatResponse), and when it was asked.
struct HostPressureNews {
  int64_t shortage_bytes = 0;
  int64_t restable_bytes = 0;
  absl::Time sent = absl::InfinitePast();
};

// Thread safe.
class CacheLink {
 public:
  explicit CacheLink(CacheLinkOptions options);
  ~CacheLink();

  // Enters the group; returns when all ranks are there. Tries again while the
  // service cannot be reached or ranks are missing, until `stop`.
  absl::Status Join(StopFlag& stop);
  // The formation `failed` has lost a rank, or its service: stops the heartbeats, joins again,
  // which ends that formation for everybody, and starts them again. DEADLINE_EXCEEDED naming the
  // missing ranks when the group is not complete within `limit`; CANCELLED at `stop`.
  absl::Status Rejoin(Epoch failed, absl::Duration limit, StopFlag& stop);
  // Renews membership and leases on a thread until Leave().
  void StartHeartbeats();
  // Why the last Join or Rejoin under way has not got any further ("missing ranks 1 of
  // 3"); empty when it has.
  std::string waiting_for() const;
  // Ends membership; one short try.
  void Leave();

  const CacheLinkOptions& options() const { return options_; }
  // The service that the group is with, until it joins another: whoever keeps these calls that one.
  std::shared_ptr<const ServiceStubs> service() const;
  Epoch epoch() const;
  std::vector<std::string> addresses() const;  // by rank
  // The last call to the service was answered.
  bool up() const;
  // None has been for long, and another service can be reached: the group is to join again, which
  // leads it there. Where none can be reached, running sequences go on as they are.
  bool lost() const;
  // Every caller of the service says how its call ended.
  void Note(const absl::Status& status);

  // Sequences that heartbeats list: their leases are renewed, and the service
  // knows that this rank may still write their pages. Added as often as removed.
  // `renewed`: when the call that gave it its lease was sent, if this rank sent it.
  void AddSequence(SequenceId sequence, absl::Time renewed = absl::InfinitePast());
  void RemoveSequence(SequenceId sequence);
  // However often it was added: the service does not know it, and this rank has
  // stopped writing to it.
  void ForgetSequence(SequenceId sequence);

  // When this rank SENT the last call by which the service renewed the lease of a
  // listed sequence, as far as it was told: at the service the lease ends later
  // than one lease after this. InfinitePast where there was none.
  absl::Time RenewedAt(SequenceId sequence) const;
  void NoteRenewed(SequenceId sequence, absl::Time sent);
  Clock& clock() const { return *options_.clock; }
  HostPressureNews host_pressure() const;
  // Called on the heartbeats' thread for listed sequences that the service does
  // not know any more. One listener, which RemoveListener() takes away.
  void SetListener(std::function<void(SequenceId)> on_unknown);
  void RemoveListener() { SetListener(nullptr); }
  // Likewise for listed sequences that are to leave the device: as they were added before the
  // heartbeat that says so was sent, since an answer may be of the time before.
  void SetSuspendListener(std::function<void(SequenceId)> on_suspended);

 private:
  // At home, or at another service where it is time for that.
  absl::Status JoinSomewhere(absl::Duration timeout, Epoch failed, StopFlag& stop);
  absl::Status LookElsewhere(Epoch failed, StopFlag& stop);
  absl::Status JoinHome(absl::Duration timeout, Epoch failed = 0);
  // `timeout`: of the wait for the other ranks; `grace`: what the answer may take beyond it.
  absl::StatusOr<v1::JoinResponse> JoinAt(const ServiceStubs& service, absl::Duration timeout,
                                          absl::Duration grace, Epoch failed);
  void NoteFormed(int service, const v1::JoinResponse& response);
  // Of the heartbeats' thread; a call of its that waits is cancelled.
  void StopHeartbeats();
  void Run();
  absl::Status Heartbeat();
  // Where home is lost, looks whether another service can be reached.
  void LookForAnother();

  struct Listed {
    int count = 0;  // how often added
    absl::Time renewed = absl::InfinitePast();
    absl::Time since = absl::InfinitePast();  // added last
  };
  bool WasListed(SequenceId sequence, absl::Time sent) const;

  const CacheLinkOptions options_;
  const std::vector<std::shared_ptr<const ServiceStubs>> services_;
  std::unique_ptr<StopFlag> stop_ = std::make_unique<StopFlag>();  // of the heartbeats
  std::thread thread_;

  mutable Mutex mutex_;
  CacheChoice choice_ ABSL_GUARDED_BY(mutex_);
  Epoch epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t answered_number_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last heartbeat that was answered
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);
  absl::Duration interval_ ABSL_GUARDED_BY(mutex_) = absl::Seconds(1);
  bool up_ ABSL_GUARDED_BY(mutex_) = false;
  bool another_answers_ ABSL_GUARDED_BY(mutex_) = false;  // while home is lost
  std::string waiting_for_ ABSL_GUARDED_BY(mutex_);
  HostPressureNews pressure_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* joining_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the call under way
  std::map<SequenceId, Listed> sequences_ ABSL_GUARDED_BY(mutex_);
  Mutex listener_mutex_;  // held during the call
  std::function<void(SequenceId)> on_unknown_ ABSL_GUARDED_BY(listener_mutex_);
  std::function<void(SequenceId)> on_suspended_ ABSL_GUARDED_BY(listener_mutex_);
};

}  // namespace heavywater
