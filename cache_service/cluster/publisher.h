// Keeps a service's records in the directory as its sequences are, behind them.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/cluster/change_queue.h"
#include "cache_service/cluster/directory.h"
#include "cache_service/cluster/sequence_copier.h"
#include "cache_service/registry/sequence_registry.h"

namespace heavywater {

struct PublisherOptions {
  std::string address;  // that records name
  bool copies_suspended = false;
  bool copies_finished = false;  // these, too
  int64_t max_copy_bytes = 0;    // of all copies
  absl::Duration copy_ttl;       // at least; beyond what is left of a lease
};

// One thread takes changed sequences from the queue and brings their records, and copies, to
// where they should be: what fails is tried again, so that nothing is lost while etcd or the
// Redis is away. A sequence that another service has taken over ends here.
class Publisher {
 public:
  // All must outlive it; `copier` may be null: no copies. `clock`: of leases.
  Publisher(const PublisherOptions& options, Directory& directory, SequenceCopier* copier,
            SequenceRegistry& sequences, ChangeQueue& changes, Clock& clock);
  ~Publisher() { Stop(); }
  void Stop();

  // Between the two the sequence is being taken over from another service: its record is left
  // alone. False: somebody does so already.
  bool BeginMove(SequenceId id);
  void EndMove(SequenceId id);
  // Its record may have changed: it is read anew.
  void LookAgain(SequenceId id);

  // Waits until nothing is left to do, or `limit` is over.
  void Flush(absl::Duration limit);

  struct Stats {
    int64_t copies = 0;
    int64_t copy_bytes = 0;
    int64_t copied = 0;
    int64_t copies_failed = 0;
    int64_t given_up = 0;  // that another service has now
  };
  Stats stats() const;

 private:
  void Run();
  // UNAVAILABLE, ABORTED: to be tried again; RESOURCE_EXHAUSTED: less soon.
  absl::Status Reconcile(SequenceId id);
  absl::Status Publish(SequenceId id, const SequenceRegistry::Exported& local);
  absl::Status Put(SequenceId id, const HeldRecord& known, const v1::SequenceRecord& record);
  absl::Status Retract(SequenceId id);
  void GiveUp(SequenceId id, const v1::SequenceRecord& now);
  v1::SequenceRecord RecordOf(const SequenceRegistry::Exported& local) const;
  bool WantsCopy(const SequenceRegistry::Exported& local, const v1::SequenceRecord& record) const;
  // The record with a new copy, where one is wanted and can be made. The status: whether
  // it is to be tried again.
  absl::Status AddCopy(SequenceId id, v1::SequenceRecord* record);
  void EraseCopy(const v1::SequenceRecord& record);
  void Forget(SequenceId id);
  void Note(SequenceId id, const HeldRecord& held);

  const PublisherOptions options_;
  Directory& directory_;
  SequenceCopier* const copier_;
  SequenceRegistry& sequences_;
  ChangeQueue& changes_;
  Clock& clock_;
  std::map<SequenceId, HeldRecord> known_;  // of this service; the thread's own
  uint64_t num_copies_ = 0;                 // made by this process, for their names
  mutable Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<SequenceId> stale_ ABSL_GUARDED_BY(mutex_);  // of what waits in the queue
  std::set<SequenceId> moving_ ABSL_GUARDED_BY(mutex_);
  Stats stats_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace heavywater
