#include "worker/server/group_rendezvous.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"

namespace heavywater {

GroupRendezvous::GroupRendezvous(const std::shared_ptr<grpc::Channel>& channel, std::string group,
                                 Epoch epoch)
    : stub_(v1::GroupService::NewStub(channel)), group_(std::move(group)), epoch_(epoch) {}

absl::Status GroupRendezvous::Put(const std::string& key, const std::string& value) {
  v1::PutRequest request;
  request.set_group(group_);
  request.set_epoch(epoch_);
  request.set_key(key);
  request.set_value(value);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
  v1::PutResponse response;
  return FromGrpcStatus(stub_->Put(&context, request, &response));
}

absl::StatusOr<std::string> GroupRendezvous::Wait(const std::string& key, absl::Duration timeout) {
  v1::WaitRequest request;
  request.set_group(group_);
  request.set_epoch(epoch_);
  request.set_key(key);
  request.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
  grpc::ClientContext context;
  // The service names the key that did not come; its answer is worth a moment.
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout + absl::Seconds(1)));
  v1::WaitResponse response;
  HW_RETURN_IF_ERROR(FromGrpcStatus(stub_->Wait(&context, request, &response)));
  return response.value();
}

}  // namespace heavywater
