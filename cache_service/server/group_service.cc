#include "cache_service/server/group_service.h"

#include "cache_service/runtime/logging.h"
#include "cache_service/server/unary.h"

namespace heavywater {
namespace {

// A call that may end later: when the registry answers, or when its caller gives
// up (a deadline, a lost connection), which frees its place in the registry.
class WaitingCall final : public grpc::ServerUnaryReactor {
 public:
  explicit WaitingCall(GroupRegistry& groups) : groups_(groups), ticket_(groups.NewTicket()) {}

  Ticket ticket() const { return ticket_; }
  void Answer(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

  void OnCancel() override { groups_.Cancel(ticket_); }
  void OnDone() override { delete this; }  // after every other reaction

 private:
  GroupRegistry& groups_;
  const Ticket ticket_;
};

}  // namespace

grpc::ServerUnaryReactor* GroupService::Join(grpc::CallbackServerContext* context,
                                             const v1::JoinRequest* request,
                                             v1::JoinResponse* response) {
  if (const absl::Status open = gate_.Check(); !open.ok()) return Finish(context, open);
  auto* const call = new WaitingCall(registry_.groups());
  registry_.groups().Join(
      call->ticket(), *request,
      [call, response, group = request->group(),
       rank = request->rank()](absl::StatusOr<v1::JoinResponse> joined) {
        if (joined.ok()) {
          *response = *joined;
          LogInfo("rank joined", {{"group", group}, {"rank", rank}, {"epoch", joined->epoch()}});
        } else {
          LogWarn("rank did not join",
                  {{"group", group}, {"rank", rank}, {"status", joined.status().ToString()}});
        }
        call->Answer(joined.status());
      });
  return call;
}

grpc::ServerUnaryReactor* GroupService::Wait(grpc::CallbackServerContext* context,
                                             const v1::WaitRequest* request,
                                             v1::WaitResponse* response) {
  if (const absl::Status open = gate_.Check(); !open.ok()) return Finish(context, open);
  auto* const call = new WaitingCall(registry_.groups());
  registry_.groups().Wait(call->ticket(), *request,
                          [call, response](absl::StatusOr<std::string> value) {
                            if (value.ok()) response->set_value(*value);
                            call->Answer(value.status());
                          });
  return call;
}

grpc::ServerUnaryReactor* GroupService::Heartbeat(grpc::CallbackServerContext* context,
                                                  const v1::HeartbeatRequest* request,
                                                  v1::HeartbeatResponse* response) {
  return Finish(context, registry_.Heartbeat(*request), response);
}

grpc::ServerUnaryReactor* GroupService::Leave(grpc::CallbackServerContext* context,
                                              const v1::LeaveRequest* request, v1::LeaveResponse*) {
  const absl::Status status = registry_.groups().Leave(*request);
  LogInfo("rank leaves", {{"group", request->group()},
                          {"rank", request->rank()},
                          {"epoch", request->epoch()},
                          {"status", status.ToString()}});
  return Finish(context, status);
}

grpc::ServerUnaryReactor* GroupService::Put(grpc::CallbackServerContext* context,
                                            const v1::PutRequest* request, v1::PutResponse*) {
  return Finish(context, registry_.groups().Put(*request));
}

grpc::ServerUnaryReactor* GroupService::ReportPlan(grpc::CallbackServerContext* context,
                                                   const v1::ReportPlanRequest* request,
                                                   v1::ReportPlanResponse* response) {
  auto result = registry_.ReportPlan(*request);
  if (absl::IsFailedPrecondition(result.status())) {
    LogError("ranks disagree", {{"group", request->group()},
                                {"rank", request->rank()},
                                {"status", result.status().ToString()}});
  }
  return Finish(context, std::move(result), response);
}

}  // namespace heavywater
