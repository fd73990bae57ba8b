// GroupService: a thin shell over the registry.
#pragma once

#include "cache_service/registry/registry.h"
#include "cache_service/server/drain_gate.h"
#include "heavywater/v1/group.grpc.pb.h"

namespace heavywater {

// Calls that wait (Join, Wait) hold no thread.
class GroupService final : public v1::GroupService::CallbackService {
 public:
  // Both must outlive it.
  GroupService(Registry& registry, const DrainGate& gate) : registry_(registry), gate_(gate) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context,
                                 const v1::JoinRequest* request,
                                 v1::JoinResponse* response) override;
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context,
                                      const v1::HeartbeatRequest* request,
                                      v1::HeartbeatResponse* response) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context,
                                  const v1::LeaveRequest* request,
                                  v1::LeaveResponse* response) override;
  grpc::ServerUnaryReactor* Put(grpc::CallbackServerContext* context, const v1::PutRequest* request,
                                v1::PutResponse* response) override;
  grpc::ServerUnaryReactor* Wait(grpc::CallbackServerContext* context,
                                 const v1::WaitRequest* request,
                                 v1::WaitResponse* response) override;
  grpc::ServerUnaryReactor* ReportPlan(grpc::CallbackServerContext* context,
                                       const v1::ReportPlanRequest* request,
                                       v1::ReportPlanResponse* response) override;

 private:
  Registry& registry_;
  const DrainGate& gate_;
};

}  // namespace heavywater
