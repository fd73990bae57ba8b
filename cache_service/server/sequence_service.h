// SequenceService: a thin shell over the registry.
#pragma once

#include <functional>
#include <utility>

#include "cache_service/base/executor.h"
#include "cache_service/registry/registry.h"
#include "cache_service/runtime/access.h"
#include "cache_service/server/cluster_link.h"
#include "cache_service/server/drain_gate.h"
#include "heavywater/v1/sequence.grpc.pb.h"

namespace heavywater {

class SequenceService final : public v1::SequenceService::CallbackService {
 public:
  // All must outlive it. `bring_ups`: where calls run that wait for pages below; `opens`: where
  // sequences are opened that do not, so that they wait for no call that does. `bring`: asked
  // for sequences that are not here.
  SequenceService(Registry& registry, const DrainGate& gate, const Access& access,
                  Executor& bring_ups, Executor& opens, BringSequence bring = nullptr)
      : registry_(registry),
        gate_(gate),
        access_(access),
        bring_ups_(bring_ups),
        opens_(opens),
        bring_(std::move(bring)) {}

  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext* context,
                                 const v1::OpenSequenceRequest* request,
                                 v1::OpenSequenceResponse* response) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context,
                                const v1::GetSequenceRequest* request,
                                v1::Sequence* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListSequencesRequest* request,
                                 v1::ListSequencesResponse* response) override;
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext* context,
                                  const v1::CloseSequenceRequest* request,
                                  v1::CloseSequenceResponse* response) override;
  grpc::ServerWriteReactor<v1::SequenceSet>* GetSets(grpc::CallbackServerContext* context,
                                                     const v1::GetSetsRequest* request) override;
  grpc::ServerUnaryReactor* Reopen(grpc::CallbackServerContext* context,
                                   const v1::ReopenSequenceRequest* request,
                                   v1::ReopenSequenceResponse* response) override;
  grpc::ServerUnaryReactor* Suspend(grpc::CallbackServerContext* context,
                                    const v1::SuspendSequenceRequest* request,
                                    v1::SuspendSequenceResponse* response) override;
  grpc::ServerUnaryReactor* Resume(grpc::CallbackServerContext* context,
                                   const v1::ResumeSequenceRequest* request,
                                   v1::ResumeSequenceResponse* response) override;
  grpc::ServerUnaryReactor* Truncate(grpc::CallbackServerContext* context,
                                     const v1::TruncateSequenceRequest* request,
                                     v1::TruncateSequenceResponse* response) override;
  grpc::ServerUnaryReactor* Fork(grpc::CallbackServerContext* context,
                                 const v1::ForkSequenceRequest* request,
                                 v1::ForkSequenceResponse* response) override;
  grpc::ServerUnaryReactor* ReadSnapshot(grpc::CallbackServerContext* context,
                                         const v1::ReadSnapshotRequest* request,
                                         v1::ReadSnapshotResponse* response) override;

 private:
  // The answer of `call`; where it is NOT_FOUND and the sequence comes from another service, the
  // one of calling it again.
  template <typename Response>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, SequenceId id,
                                   Response* response,
                                   std::function<absl::StatusOr<Response>()> call);
  template <typename Response>
  void AnswerHere(grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor,
                  SequenceId id, Response* response,
                  std::function<absl::StatusOr<Response>()> call);
  // Likewise, on a thread of `executor`; `id` 0: nothing comes from another service.
  template <typename Response>
  grpc::ServerUnaryReactor* AnswerLater(Executor& executor, grpc::CallbackServerContext* context,
                                        SequenceId id, Response* response,
                                        std::function<absl::StatusOr<Response>()> call);

  Registry& registry_;
  const DrainGate& gate_;
  const Access& access_;
  Executor& bring_ups_;
  Executor& opens_;
  const BringSequence bring_;  // may be null
};

}  // namespace heavywater
