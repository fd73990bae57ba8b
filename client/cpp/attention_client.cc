#include "client/cpp/attention_client.h"

#include <grpcpp/grpcpp.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "client/cpp/reading.h"

namespace heavywater {
namespace {

void SetDeadline(grpc::ClientContext& context, std::chrono::milliseconds timeout) {
  context.set_deadline(std::chrono::system_clock::now() + timeout);
}

std::string BytesOf(std::span<const float> numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes());
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionClient>> AttentionClient::Connect(
    const std::string& worker_address, const v1::AttachEngineRequest& shape,
    std::chrono::milliseconds timeout, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // nothing is quietly called again
  HW_ASSIGN_OR_RETURN(auto channels, Channels::Create(security));
  HW_ASSIGN_OR_RETURN(const auto channel, channels->Make(worker_address, arguments));
  HW_ASSIGN_OR_RETURN(auto client, Attach(v1::AttentionService::NewStub(channel), shape, timeout));
  client->channels_ = std::move(channels);
  return client;
}

absl::StatusOr<std::unique_ptr<AttentionClient>> AttentionClient::Attach(
    std::unique_ptr<Stub> stub, const v1::AttachEngineRequest& shape,
    std::chrono::milliseconds timeout) {
  std::unique_ptr<AttentionClient> client(new AttentionClient(std::move(stub), timeout));
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HW_RETURN_IF_ERROR(FromGrpc(client->stub_->Attach(&context, shape, &client->attached_)));
  return client;
}

AttentionClient::~AttentionClient() {
  if (stream_ == nullptr || !ended_.ok()) return;
  stream_->WritesDone();
  v1::StepResponse ignored;
  while (stream_->Read(&ignored)) {
  }
  (void)stream_->Finish();
}

absl::StatusOr<v1::StepResponse> AttentionClient::Call(v1::StepRequest request) {
  HW_RETURN_IF_ERROR(ended_);
  if (stream_ == nullptr) stream_ = stub_->Step(&context_);
  request.set_attachment_id(attached_.attachment_id());
  v1::StepResponse response;
  if (!stream_->Write(request) || !stream_->Read(&response)) {
    ended_ = FromGrpc(stream_->Finish());
    if (ended_.ok()) ended_ = absl::UnavailableError("the worker has ended the stream");
    return ended_;
  }
  if (!response.has_error()) return response;
  return absl::Status(static_cast<absl::StatusCode>(response.error().code()),
                      response.error().message());
}

absl::StatusOr<v1::OpenedAttention> AttentionClient::Open(const v1::OpenAttention& sequence) {
  v1::StepRequest request;
  *request.mutable_open() = sequence;
  HW_ASSIGN_OR_RETURN(const v1::StepResponse response, Call(std::move(request)));
  return response.opened();
}

absl::Status AttentionClient::Close(uint64_t sequence_id) {
  v1::StepRequest request;
  request.mutable_close()->set_sequence_id(sequence_id);
  return Call(std::move(request)).status();
}

absl::StatusOr<v1::BegunStep> AttentionClient::Begin(const v1::BeginStep& step) {
  v1::StepRequest request;
  *request.mutable_begin() = step;
  HW_ASSIGN_OR_RETURN(const v1::StepResponse response, Call(std::move(request)));
  return response.begun();
}

absl::StatusOr<std::vector<float>> AttentionClient::Attend(int layer,
                                                           std::span<const float> queries,
                                                           std::span<const float> keys,
                                                           std::span<const float> values) {
  v1::StepRequest request;
  v1::AttendLayer& attend = *request.mutable_attend();
  attend.set_layer(layer);
  attend.set_queries(BytesOf(queries));
  attend.set_keys(BytesOf(keys));
  attend.set_values(BytesOf(values));
  HW_ASSIGN_OR_RETURN(const v1::StepResponse response, Call(std::move(request)));
  const std::string& out = response.attended().out();
  if (out.size() != queries.size_bytes()) {
    return absl::DataLossError(absl::StrCat("attention of layer ", layer, " has ", out.size(),
                                            " bytes, want ", queries.size_bytes()));
  }
  std::vector<float> numbers(queries.size());
  if (!numbers.empty()) std::memcpy(numbers.data(), out.data(), out.size());
  return numbers;
}

absl::StatusOr<v1::EndedStep> AttentionClient::End() {
  v1::StepRequest request;
  request.mutable_end();
  HW_ASSIGN_OR_RETURN(const v1::StepResponse response, Call(std::move(request)));
  return response.ended();
}

absl::StatusOr<std::vector<v1::KeptResponse>> AttentionClient::Kept(uint64_t sequence_id) {
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::KeptRequest request;
  request.set_sequence_id(sequence_id);
  std::vector<v1::KeptResponse> messages;
  const auto reader = stub_->Kept(&context, request);
  HW_RETURN_IF_ERROR(Drain(*reader, [&messages](v1::KeptResponse& message) {
    messages.push_back(std::move(message));
    return absl::OkStatus();
  }));
  return messages;
}

absl::StatusOr<std::string> AttentionClient::ReadKv(const v1::ReadKvRequest& request) {
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  std::string rows;
  const auto reader = stub_->ReadKv(&context, request);
  HW_RETURN_IF_ERROR(Drain(*reader, [&rows](const v1::ReadKvResponse& response) {
    rows.append(response.rows());
    return CheckRows(response);
  }));
  return rows;
}

}  // namespace heavywater
