#include "cache_service/etcd/etcd_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {

EtcdWatch::EtcdWatch(etcdserverpb::Watch::Stub& stub, std::unique_ptr<grpc::ClientContext> context,
                     const etcdserverpb::WatchCreateRequest& first)
    : context_(std::move(context)), stream_(stub.Watch(context_.get())) {
  etcdserverpb::WatchRequest request;
  *request.mutable_create_request() = first;
  stream_->Write(request);  // where it fails, so does the first Next()
}

EtcdWatch::~EtcdWatch() { Cancel(); }

void EtcdWatch::Cancel() { context_->TryCancel(); }

absl::StatusOr<std::vector<EtcdEvent>> EtcdWatch::Next() {
  etcdserverpb::WatchResponse response;
  if (!stream_->Read(&response)) {
    const grpc::Status status = stream_->Finish();
    const auto code = static_cast<absl::StatusCode>(status.error_code());
    if (code == absl::StatusCode::kCancelled) return absl::CancelledError("the watch has ended");
    return absl::UnavailableError(
        absl::StrCat("etcd's stream of changes broke off: ", status.error_message()));
  }
  if (response.compact_revision() > 0) {
    return absl::OutOfRangeError(absl::StrCat("etcd has compacted its changes up to revision ",
                                              response.compact_revision()));
  }
  if (response.canceled()) {
    return absl::UnavailableError(
        absl::StrCat("etcd has ended a watch: ", response.cancel_reason()));
  }
  std::vector<EtcdEvent> events;
  for (etcdserverpb::Event& event : *response.mutable_events()) {
    etcdserverpb::KeyValue& kv = *event.mutable_kv();
    events.push_back({.deleted = event.type() == etcdserverpb::Event::DELETE,
                      .entry = {.key = std::move(*kv.mutable_key()),
                                .value = std::move(*kv.mutable_value()),
                                .revision = kv.mod_revision()}});
  }
  return events;
}

}  // namespace heavywater
