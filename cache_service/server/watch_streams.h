// The streams of AdminService.Watch.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <set>

#include "absl/status/status.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "cache_service/server/admin_stats.h"
#include "cache_service/server/event_log.h"
#include "heavywater/v1/admin.grpc.pb.h"

namespace heavywater {

class WatchStream;

// Thread safe. Time passes in Tick().
class WatchStreams {
 public:
  static constexpr size_t kMaxStreams = 64;

  // All must outlive it.
  WatchStreams(const AdminStats& stats, const EventLog& events, Clock& clock)
      : stats_(stats), events_(events), clock_(clock) {}

  // A stream, or one that ends at once: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE.
  grpc::ServerWriteReactor<v1::WatchResponse>* Start(const v1::WatchRequest& request);
  void Tick();
  // The process ends, and so do all streams.
  void Stop();

 private:
  friend class WatchStream;
  void Remove(WatchStream* stream);
  absl::Status CheckStart(const v1::WatchRequest& request);

  const AdminStats& stats_;
  const EventLog& events_;
  Clock& clock_;
  Mutex mutex_;  // taken before a stream's
  std::set<WatchStream*> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace heavywater
