// One rank's ncclComm_t: non-blocking, and safe to abort from any thread.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Used by one thread, except Abort() and CheckAsync(). After an error only
// Abort() and the destructor may be called.
class NcclHandle {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    absl::Duration timeout = absl::Seconds(30);
    // Asked now and then while the ranks meet; its error ends the attempt.
    std::function<absl::Status()> keep_waiting;
  };

  // Joins the ranks that share `id`; returns when all have come. The calling
  // thread's device is the rank's. DEADLINE_EXCEEDED after the time-out.
  static absl::StatusOr<std::unique_ptr<NcclHandle>> Create(const ncclUniqueId& id,
                                                            const Options& options);
  // Aborts unless Finish() was called.
  ~NcclHandle();

  // Calls queue(comm) and waits until NCCL has taken the work: a first use may
  // have to open connections. UNAVAILABLE after Abort().
  absl::Status Queue(const char* expression, const std::function<ncclResult_t(ncclComm_t)>& queue);

  // What NCCL has found out by itself. OK while it works, and after Abort().
  absl::Status CheckAsync();

  // Ends all work on the device and frees the communicator. Any thread.
  void Abort();

  // The orderly end, when all ranks come to it: waits for queued work, for
  // `timeout` at most, then aborts.
  void Finish(absl::Duration timeout);

 private:
  explicit NcclHandle(absl::Duration timeout) : timeout_(timeout) {}

  absl::Status Init(const ncclUniqueId& id, const Options& options);
  // Waits while `result` is ncclInProgress.
  absl::Status Await(ncclResult_t result, const char* expression, absl::Time deadline,
                     const std::function<absl::Status()>& keep_waiting);

  const absl::Duration timeout_;
  Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace heavywater
