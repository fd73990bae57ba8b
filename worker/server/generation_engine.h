// From a request to a running generation: everything about Generate that is not
// gRPC.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/generation.pb.h"
#include "worker/server/admission_queue.h"
#include "worker/server/memory_check.h"
#include "worker/server/sequence_client.h"
#include "worker/server/served_generation.h"

namespace heavywater {

// Thread safe.
class GenerationEngine {
 public:
  // All outlive this.
  GenerationEngine(GenerationLimits limits, const MemoryCheck& memory, SequenceClient& sequences,
                   AdmissionQueue& queue)
      : limits_(limits), memory_(memory), sequences_(sequences), queue_(queue) {}

  // Checks, registers and queues. Everything that Generate's comment in
  // generation.proto lists; ALREADY_EXISTS for a request_id that runs.
  absl::StatusOr<std::shared_ptr<ServedGeneration>> Start(const v1::GenerateRequest& request);
  // Once for each that was started, when its stream is over. `any_output`: the
  // client got a token, so what the service holds of it lives on.
  void End(const ServedGeneration& generation, bool any_output);
  // The sequence leaves the device, if it runs; its call ends ABORTED.
  void Suspend(SequenceId sequence);
  // A client has gone: the step looks sooner.
  void Wake() { queue_.Wake(); }

 private:
  absl::StatusOr<GenerationRequest> Parse(const v1::GenerateRequest& proto);
  absl::StatusOr<std::shared_ptr<ServedGeneration>> OpenAndQueue(GenerationRequest request,
                                                                 bool claimed);
  // Of a request that continues: the sequence as it was, else one that is computed again.
  absl::StatusOr<OpenedSequence> OpenSequence(const GenerationRequest& request, bool claimed);
  void GiveBack(const ServedGeneration& generation);
  absl::StatusOr<OpenedSequence> Reopen(const GenerationRequest& request);
  // A turn may come before the last reports of the sequence have arrived: then less of its
  // text is known, and more is computed. Whether they have: no rank writes to it any more.
  bool WaitForReports(SequenceId sequence);
  // The sequence that the request resumes is its alone until ReleaseSequence(). Where its
  // client is back, what still runs for the connection that it has lost ends first; a
  // turn waits for that.
  // False: nothing is resumed, there is no cache service (then ids are those of this
  // process alone), or the id is of another request, which runs on.
  absl::StatusOr<bool> ClaimSequence(const GenerationRequest& request);
  void ReleaseSequence(SequenceId sequence);
  absl::Status ClaimRequestId(const std::string& tenant, const std::string& request_id);
  void ReleaseRequestId(const std::string& tenant, const std::string& request_id);

  const GenerationLimits limits_;
  const MemoryCheck& memory_;
  SequenceClient& sequences_;
  AdmissionQueue& queue_;
  Mutex mutex_;
  CondVar changed_;
  // That run: (tenant, request_id). Tenants do not see each other's.
  std::set<std::pair<std::string, std::string>> request_ids_ ABSL_GUARDED_BY(mutex_);
  std::set<SequenceId> claimed_ ABSL_GUARDED_BY(mutex_);  // about to run again
  std::map<SequenceId, std::shared_ptr<ServedGeneration>> running_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, absl::Time> ended_ ABSL_GUARDED_BY(mutex_);  // lately, and when
};

}  // namespace heavywater
