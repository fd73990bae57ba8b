// One accepted request on its way: shared by the call's thread and the
// thread of the step.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/runtime/trace_context.h"
#include "worker/server/generation_request.h"
#include "worker/server/response_queue.h"
#include "worker/server/sequence_client.h"

namespace heavywater {

class ServedGeneration {
 public:
  // Why it ends although it has not finished.
  enum class CutOff { kByClient, kSuspended, kTakenOver };

  // What a slow client may leave unread.
  static constexpr size_t kMaxUnreadMessages = 256;
  static constexpr int64_t kMaxUnreadBytes = int64_t{16} << 20;

  ServedGeneration(GenerationRequest request, const OpenedSequence& opened)
      : request(std::move(request)),
        sequence(opened.id),
        lease(opened.lease),
        opened(opened),
        tokens_(this->request.received) {}

  // The step's side, before the client is told a new token.
  void NoteToken(int32_t token);
  // `other` is the same request again: equal prompt, suffix, policy and tenant, and its
  // tokens are this one's, as far as both have them.
  bool IsContinuedBy(const GenerationRequest& other) const;

  // It leaves the device with the next step.
  void Cancel(CutOff reason);
  // It was cut off, but its sequence is wanted: suspended, or taken over by another call.
  bool goes_on_elsewhere() const { return cut_off_ != CutOff::kByClient; }
  // As its call ends then.
  absl::Status CancelledStatus() const;

  const GenerationRequest request;
  const SequenceId sequence;
  const absl::Duration lease;  // as OpenedSequence says
  const OpenedSequence opened;
  const std::string trace = ScopedTrace::Current();  // the call's
  // What the ranks were to restore is lost or broken: it is of no use to anybody.
  std::atomic<bool> restore_failed = false;
  // Some rank may have heard of it.
  std::atomic<bool> reached_ranks = false;
  ResponseQueue responses{kMaxUnreadMessages, kMaxUnreadBytes};

 private:
  std::atomic<CutOff> cut_off_ = CutOff::kByClient;
  mutable Mutex mutex_;
  std::vector<int32_t> tokens_ ABSL_GUARDED_BY(mutex_);  // new ones: the client's, and those told
};

}  // namespace heavywater
