#include "client/cpp/admin_client.h"

#include <grpcpp/grpcpp.h>

#include <thread>
#include <utility>

#include "cache_service/base/status.h"
#include "client/cpp/channel.h"
#include "client/cpp/rpc_status.h"

namespace heavywater {
namespace {

constexpr std::chrono::milliseconds kDrain{60'000};  // the service's default

template <typename Response, typename Method, typename Request>
absl::StatusOr<Response> Call(v1::AdminService::StubInterface& stub, Method method,
                              const Request& request, std::chrono::milliseconds timeout) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  Response response;
  HW_RETURN_IF_ERROR(FromGrpc((stub.*method)(&context, request, &response)));
  return response;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const std::string& cache_address,
                                                                  std::chrono::milliseconds timeout,
                                                                  const ChannelSecurity& security) {
  if (cache_address.empty()) {
    return absl::InvalidArgumentError("cache_address is empty, want the cache service's host:port");
  }
  HW_ASSIGN_OR_RETURN(auto channels, Channels::Create(security));
  HW_ASSIGN_OR_RETURN(const auto channel, channels->Make(cache_address, ClientChannelArguments()));
  auto client = std::make_unique<AdminClient>(
      v1::AdminService::NewStub(channel), timeout,
      [](std::chrono::milliseconds backoff) { std::this_thread::sleep_for(backoff); });
  client->channels_ = std::move(channels);
  return client;
}

AdminClient::AdminClient(std::unique_ptr<Stub> stub, std::chrono::milliseconds timeout,
                         Sleeper sleep)
    : stub_(std::move(stub)), timeout_(timeout), sleep_(std::move(sleep)) {}

absl::StatusOr<v1::StatsResponse> AdminClient::Stats() {
  return ReadWithRetries(sleep_, [this] {
    return Call<v1::StatsResponse>(*stub_, &Stub::Stats, v1::StatsRequest(), timeout_);
  });
}

absl::StatusOr<std::string> AdminClient::GetConfig() {
  HW_ASSIGN_OR_RETURN(const v1::GetConfigResponse response, ReadWithRetries(sleep_, [this] {
                        return Call<v1::GetConfigResponse>(*stub_, &Stub::GetConfig,
                                                           v1::GetConfigRequest(), timeout_);
                      }));
  return response.yaml();
}

absl::StatusOr<v1::TenantStats> AdminClient::SetQuota(const v1::SetQuotaRequest& request) {
  v1::SetQuotaRequest identified = request;
  if (identified.request_id().empty()) identified.set_request_id(NewRequestId());
  HW_ASSIGN_OR_RETURN(const v1::SetQuotaResponse response,
                      Call<v1::SetQuotaResponse>(*stub_, &Stub::SetQuota, identified, timeout_));
  return response.tenant();
}

absl::StatusOr<v1::PinResponse> AdminClient::Pin(uint64_t sequence_id, const std::string& owner,
                                                 int64_t ttl_ms) {
  v1::PinRequest request;
  request.set_request_id(NewRequestId());
  request.set_sequence_id(sequence_id);
  request.set_owner(owner);
  request.set_ttl_ms(ttl_ms);
  return Call<v1::PinResponse>(*stub_, &Stub::Pin, request, timeout_);
}

absl::StatusOr<v1::PinResponse> AdminClient::Unpin(uint64_t sequence_id, const std::string& owner) {
  v1::PinRequest request;
  request.set_request_id(NewRequestId());
  request.set_sequence_id(sequence_id);
  request.set_owner(owner);
  request.set_unpin(true);
  return Call<v1::PinResponse>(*stub_, &Stub::Pin, request, timeout_);
}

absl::StatusOr<v1::DrainState> AdminClient::Drain(int64_t deadline_ms, bool suspend) {
  v1::DrainRequest request;
  request.set_request_id(NewRequestId());
  request.set_deadline_ms(deadline_ms);
  request.set_suspend(suspend);
  const auto waits = deadline_ms > 0 ? std::chrono::milliseconds(deadline_ms) : kDrain;
  HW_ASSIGN_OR_RETURN(const v1::DrainResponse response,
                      Call<v1::DrainResponse>(*stub_, &Stub::Drain, request, waits + timeout_));
  return response.drain();
}

absl::Status AdminClient::UndoDrain() {
  v1::DrainRequest request;
  request.set_request_id(NewRequestId());
  request.set_undo(true);
  return Call<v1::DrainResponse>(*stub_, &Stub::Drain, request, timeout_).status();
}

absl::StatusOr<v1::FlushResponse> AdminClient::Flush(uint64_t sequence_id,
                                                     std::chrono::milliseconds timeout) {
  v1::FlushRequest request;
  request.set_request_id(NewRequestId());
  request.set_sequence_id(sequence_id);
  return Call<v1::FlushResponse>(*stub_, &Stub::Flush, request, timeout);
}

absl::StatusOr<v1::SnapshotResponse> AdminClient::Snapshot() {
  v1::SnapshotRequest request;
  request.set_request_id(NewRequestId());
  return Call<v1::SnapshotResponse>(*stub_, &Stub::Snapshot, request, timeout_);
}

absl::Status AdminClient::Watch(const v1::WatchRequest& request,
                                const std::function<bool(const v1::WatchResponse&)>& on_message) {
  grpc::ClientContext context;  // without a deadline: it lasts as long as somebody looks
  const auto reader = stub_->Watch(&context, request);
  v1::WatchResponse message;
  bool left = false;
  while (!left && reader->Read(&message)) left = !on_message(message);
  if (left) {
    context.TryCancel();
    while (reader->Read(&message)) {
    }
  }
  const absl::Status status = FromGrpc(reader->Finish());
  return left ? absl::OkStatus() : status;
}

}  // namespace heavywater
