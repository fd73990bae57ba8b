// Which cache services are heard of, as etcd last told.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/cache_cluster.pb.h"

namespace heavywater {

// Thread safe. A service whose key has gone may be back in a moment: etcd may have been away
// for longer than leases live. It counts as gone only after `grace`, in all of which etcd
// was heard of.
class Members {
 public:
  // The clock must outlive it.
  Members(absl::Duration grace, Clock& clock) : grace_(grace), clock_(clock) {}

  // All there are, from now on.
  void Reset(const std::vector<v1::ServiceRecord>& services);
  void Put(const std::string& service, const v1::ServiceRecord& record);
  void Remove(const std::string& service);
  // etcd tells nothing any more, until Reset().
  void LoseSight();

  enum class Presence { kUnknown, kHere, kMissing, kGone };
  Presence Of(const std::string& service) const;
  // Since when it is known not to be there; InfiniteFuture: it is, or nobody knows.
  absl::Time MissingSince(const std::string& service) const;
  int size() const;

 private:
  absl::Time MissingSinceLocked(const std::string& service) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration grace_;
  Clock& clock_;
  mutable Mutex mutex_;
  bool in_sight_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // in sight without a gap
  std::map<std::string, v1::ServiceRecord> here_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, absl::Time> left_ ABSL_GUARDED_BY(mutex_);  // while in sight
};

}  // namespace heavywater
