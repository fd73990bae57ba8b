// One cache service among several: what it tells the others through etcd, and how it comes
// by the sequences of one that is lost.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/executor.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/base/viewer.h"
#include "cache_service/cluster/change_queue.h"
#include "cache_service/cluster/directory.h"
#include "cache_service/cluster/members.h"
#include "cache_service/cluster/publisher.h"
#include "cache_service/cluster/sequence_copier.h"
#include "cache_service/etcd/etcd_client.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/remote_copies.h"

namespace heavywater {

// Of services that share sequences: each has a slot of ids.
inline constexpr int kMaxCacheServices = 64;

struct ClusterOptions {
  EtcdOptions etcd;
  std::string prefix;
  std::string service;                       // this one's name, which a restart with a state keeps
  absl::Duration lease = absl::Seconds(10);  // of its place
  absl::Duration takeover = absl::Seconds(5);  // after its end
  std::string redis_address = {};              // empty: no copies
  RedisEndpoint redis = {};                    // but for the address
  PublisherOptions publisher = {};             // but for the address
};

// Thread safe after Start().
class Cluster {
 public:
  // Takes a slot of ids. Where etcd cannot be reached it begins without, as serving must not
  // wait for etcd: then by chance. INVALID_ARGUMENT naming what is wrong.
  static absl::StatusOr<std::unique_ptr<Cluster>> Create(const ClusterOptions& options);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  int slot() const { return slot_; }
  // Told by the registry. Lives as long as this.
  ChangeQueue& changes() { return changes_; }

  // `address`: of this service. The others must outlive this; `clock`: of leases.
  void Start(const std::string& address, Registry& registry, OrderedPageStore& store, Clock& clock);

  // Of a sequence that is not here: OK when it is now, as another service has been lost that had
  // it. FAILED_PRECONDITION (ElsewhereError): another one has it; NOT_FOUND: nobody; DATA_LOSS:
  // it was lost with its service; UNAVAILABLE: not known now. `done` is called once, on another
  // thread or at once.
  void Bring(SequenceId id, const Viewer& viewer, std::function<void(const absl::Status&)> done);

  // Waits until all is written that others need, at most so long.
  void Flush(absl::Duration limit);

  // Before what Start() was given ends: it is not heard of any more, and others may take its
  // sequences over.
  void Stop();

  struct Stats {
    bool etcd_up = false;
    bool leader = false;
    int services = 0;
    int64_t pending = 0;                        // changed sequences that etcd does not know of yet
    absl::Duration lag = absl::ZeroDuration();  // of the first of them
    int64_t takeovers = 0;
    int64_t takeovers_failed = 0;
    int64_t lost = 0;     // sequences of lost services, without a copy; counted by the leader
    int64_t cleaned = 0;  // records of lost services that the leader has removed
    Publisher::Stats published = {};
  };
  Stats stats() const;

 private:
  explicit Cluster(const ClusterOptions& options, std::unique_ptr<EtcdClient> etcd,
                   std::unique_ptr<RemoteCopies> copies);
  absl::Status TakeSlot();

  absl::Status NotHeardOf(SequenceId id, const v1::SequenceRecord& record) const;
  absl::Status BringNow(SequenceId id, const Viewer& viewer);
  absl::Status TakeOver(SequenceId id, const HeldRecord& held);
  absl::Status Move(SequenceId id, const HeldRecord& held);

  // --- Threads --- (cluster_threads.cc)
  bool Sleep(absl::Duration duration);  // false: it is to stop
  bool stopping() const;
  void Beat();
  absl::Status BeatOnce();
  absl::Status NewLease();
  v1::ServiceRecord OwnRecord() const;
  void WatchAll();
  absl::Status WatchOnce();
  void Apply(const EtcdEvent& event);
  absl::Status CleanUp();
  bool IsOver(const v1::SequenceRecord& record, absl::Time now) const;
  void CleanUpOne(SequenceId id, const HeldRecord& held);

  const ClusterOptions options_;
  const std::unique_ptr<EtcdClient> etcd_;
  const std::unique_ptr<RemoteCopies> copies_;  // null: none
  Directory directory_;
  Members members_;
  ChangeQueue changes_;
  int slot_ = 0;
  std::string address_;
  Registry* registry_ = nullptr;
  Clock* clock_ = nullptr;
  std::unique_ptr<SequenceCopier> copier_;
  std::unique_ptr<Publisher> publisher_;

  // Of the beating thread, after Create().
  int64_t lease_ = 0;
  std::string registered_;  // the record as etcd has it
  absl::Time next_clean_up_ = absl::InfinitePast();
  std::set<SequenceId> lost_;  // that were counted

  mutable Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Stats stats_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<EtcdWatch> watch_ ABSL_GUARDED_BY(mutex_);
  // By sequence: a call that waits for one, or for its pages, holds up few others.
  std::array<std::unique_ptr<ThreadExecutor>, 8> bringers_;
  std::atomic<bool> started_ = false;
  std::thread beater_;
  std::thread watcher_;
};

}  // namespace heavywater
