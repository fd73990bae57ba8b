#include "worker/server/attention_service.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"

namespace heavywater {
namespace {

using StepStream = grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>;

absl::Status Converse(AttentionHost& host, v1::StepRequest& request, StepStream& stream) {
  do {
    v1::StepResponse response;
    HW_RETURN_IF_ERROR(host.Handle(request, response));
    if (!stream.Write(response)) break;  // the client has gone
  } while (stream.Read(&request));
  return absl::OkStatus();
}

absl::Status ReadAll(AttentionHost& host, const v1::ReadKvRequest& request,
                     grpc::ServerWriter<v1::ReadKvResponse>& writer) {
  int64_t rows_sent = 0;
  do {
    HW_ASSIGN_OR_RETURN(const v1::ReadKvResponse response,
                        host.ReadKv(request, request.first_position() + rows_sent));
    rows_sent += static_cast<int64_t>(response.rows().size()) / host.row_bytes();
    if (!writer.Write(response)) break;
  } while (rows_sent < request.num_positions());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AttentionHost*> AttentionService::Host() const {
  AttentionHost* host = host_;
  if (host == nullptr) return absl::UnavailableError("the worker group is not ready");
  return host;
}

grpc::Status AttentionService::Attach(grpc::ServerContext* context,
                                      const v1::AttachEngineRequest* request,
                                      v1::AttachEngineResponse* response) {
  const auto host = Host();
  if (!host.ok()) return ToGrpcStatus(host.status());
  auto attached = (*host)->Attach(*request);
  if (attached.ok()) *response = *std::move(attached);
  return ToGrpcStatus(attached.status());
}

grpc::Status AttentionService::Step(grpc::ServerContext* context, StepStream* stream) {
  const auto host = Host();
  if (!host.ok()) return ToGrpcStatus(host.status());
  v1::StepRequest request;
  if (!stream->Read(&request)) return grpc::Status::OK;
  const absl::Status begun = (*host)->BeginStream(request.attachment_id());
  if (!begun.ok()) return ToGrpcStatus(begun);
  const absl::Status status = Converse(**host, request, *stream);
  (*host)->EndStream();
  return ToGrpcStatus(status);
}

grpc::Status AttentionService::Kept(grpc::ServerContext* context, const v1::KeptRequest* request,
                                    grpc::ServerWriter<v1::KeptResponse>* writer) {
  const auto host = Host();
  if (!host.ok()) return ToGrpcStatus(host.status());
  const auto messages = (*host)->Kept(*request);
  if (!messages.ok()) return ToGrpcStatus(messages.status());
  for (const v1::KeptResponse& message : *messages) {
    if (!writer->Write(message)) break;
  }
  return grpc::Status::OK;
}

grpc::Status AttentionService::ReadKv(grpc::ServerContext* context,
                                      const v1::ReadKvRequest* request,
                                      grpc::ServerWriter<v1::ReadKvResponse>* writer) {
  const auto host = Host();
  if (!host.ok()) return ToGrpcStatus(host.status());
  return ToGrpcStatus(ReadAll(**host, *request, *writer));
}

}  // namespace heavywater
