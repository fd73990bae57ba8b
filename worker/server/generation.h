// One accepted request on its way: shared by the call's thread and the
// thread of the step.
#pragma once

#include <atomic>
#include <utility>

#include "cache_service/base/ids.h"
#include "worker/server/generation_request.h"
#include "worker/server/response_queue.h"
#include "worker/server/sequence_client.h"

namespace heavywater {

struct Generation {
  // What a slow client may leave unread.
  static constexpr size_t kMaxUnreadMessages = 256;
  static constexpr int64_t kMaxUnreadBytes = int64_t{16} << 20;

  Generation(GenerationRequest request, const OpenedSequence& opened)
      : request(std::move(request)), sequence(opened.id), lease(opened.lease), opened(opened) {}

  const GenerationRequest request;
  const SequenceId sequence;
  const absl::Duration lease;  // as OpenedSequence says
  const OpenedSequence opened;
  // The ranks could not restore it: it is of no use to anybody.
  std::atomic<bool> restore_failed = false;
  ResponseQueue responses{kMaxUnreadMessages, kMaxUnreadBytes};
};

}  // namespace heavywater
