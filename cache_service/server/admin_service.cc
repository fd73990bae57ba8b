#include "cache_service/server/admin_service.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/validate.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/server/unary.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxDrainMs = 24 * 3'600'000;

absl::Status CheckDrain(const v1::DrainRequest& request) {
  HW_RETURN_IF_ERROR(CheckInt("deadline_ms", request.deadline_ms(), 0, kMaxDrainMs));
  if (!request.undo() || (!request.suspend() && request.deadline_ms() == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "undo is set with suspend or deadline_ms, want undo alone or none of it");
}

std::string QuotaText(const v1::TenantStats& tenant) {
  const v1::TenantQuota& quota = tenant.quota();
  return absl::StrCat("tenant \"", tenant.tenant(), "\": ", quota.host_bytes(), " bytes of host, ",
                      quota.lower_bytes(), " below, ", quota.sequences(), " sequences",
                      tenant.own_quota() ? "" : " (the default)");
}

}  // namespace

grpc::ServerUnaryReactor* AdminService::Stats(grpc::CallbackServerContext* context,
                                              const v1::StatsRequest*,
                                              v1::StatsResponse* response) {
  *response = parts_.stats.Collect();
  return Finish(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetConfig(grpc::CallbackServerContext* context,
                                                  const v1::GetConfigRequest*,
                                                  v1::GetConfigResponse* response) {
  response->set_yaml(config_yaml_);
  return Finish(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::SetQuota(grpc::CallbackServerContext* context,
                                                 const v1::SetQuotaRequest* request,
                                                 v1::SetQuotaResponse* response) {
  const absl::StatusOr<bool> replay = replays_.Find(*request, response);
  if (!replay.ok() || *replay) return Finish(context, replay.status());
  auto set = parts_.registry.quotas().Set(*request);
  if (set.ok()) {
    LogInfo("quota set", {{"tenant", request->tenant()},
                          {"quota", QuotaText(set->tenant())},
                          {"peer", context->peer()}});
    parts_.events.Add("quota", QuotaText(set->tenant()));
    replays_.Keep(*request, *set);
  }
  return Finish(context, std::move(set), response);
}

grpc::ServerUnaryReactor* AdminService::Pin(grpc::CallbackServerContext* context,
                                            const v1::PinRequest* request,
                                            v1::PinResponse* response) {
  const absl::StatusOr<bool> replay = replays_.Find(*request, response);
  if (!replay.ok() || *replay) return Finish(context, replay.status());
  auto pinned = parts_.registry.sequences().Pin(*request);
  if (pinned.ok()) {
    const char* const what = request->unpin() ? "unpin" : "pin";
    LogInfo(what, {{"sequence", request->sequence_id()},
                   {"owner", request->owner()},
                   {"ttl_ms", request->ttl_ms()},
                   {"peer", context->peer()}});
    parts_.events.Add(
        what, absl::StrCat("sequence ", request->sequence_id(), " by \"", request->owner(), "\""));
    replays_.Keep(*request, *pinned);
  }
  return Finish(context, std::move(pinned), response);
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context,
                                              const v1::DrainRequest* request,
                                              v1::DrainResponse* response) {
  const absl::StatusOr<bool> replay = replays_.Find(*request, response);
  if (!replay.ok() || *replay) return Finish(context, replay.status());
  if (const absl::Status valid = CheckDrain(*request); !valid.ok()) return Finish(context, valid);
  LogInfo(
      request->undo() ? "takes new work again" : "drains",
      {{"peer", context->peer()}, {"suspend", request->suspend()}, {"ms", request->deadline_ms()}});
  parts_.events.Add(request->undo() ? "undo_drain" : "drain", "");
  if (request->undo()) {
    parts_.drainer.Undo();
    replays_.Keep(*request, *response);
    return Finish(context, absl::OkStatus());
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  parts_.drainer.Begin(
      *request, [context] { return context->IsCancelled(); },
      [this, reactor, response,
       request = *request](const absl::StatusOr<v1::DrainResponse>& drained) {
        if (drained.ok()) {
          *response = *drained;
          parts_.events.Add("drained", absl::StrCat(drained->drain().running_sequences(),
                                                    " sequences still run"));
          replays_.Keep(request, *drained);
        }
        reactor->Finish(ToGrpcStatus(drained.status()));
      });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::Flush(grpc::CallbackServerContext* context,
                                              const v1::FlushRequest* request,
                                              v1::FlushResponse* response) {
  const absl::StatusOr<bool> replay = replays_.Find(*request, response);
  if (!replay.ok() || *replay) return Finish(context, replay.status());
  if (!parts_.store.has_lower_tiers()) {
    return Finish(context, absl::FailedPreconditionError(
                               "there is no tier below host memory (disk_path, redis_address)"));
  }
  if (request->sequence_id() != 0) {
    const auto owner = parts_.registry.sequences().FindOwner(request->sequence_id());
    if (!owner.ok()) return Finish(context, owner.status());
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  FlushNext({context, reactor, request, response});
  return reactor;
}

void AdminService::FlushNext(const FlushCall& call) {
  const absl::Status scheduled = parts_.background.Schedule([this, call] {
    const int64_t moved = parts_.store.FlushBatch(call.request->sequence_id());
    call.response->set_moved_bytes(call.response->moved_bytes() + moved);
    if (moved > 0 && !call.context->IsCancelled()) return FlushNext(call);
    EndFlush(call, absl::OkStatus());
  });
  if (!scheduled.ok()) EndFlush(call, scheduled);
}

void AdminService::EndFlush(const FlushCall& call, const absl::Status& status) {
  call.response->set_host_used_bytes(parts_.store.Stats().used_bytes);
  if (status.ok()) {
    const int64_t moved = call.response->moved_bytes();
    LogInfo("flushed", {{"moved_bytes", moved}, {"peer", call.context->peer()}});
    parts_.events.Add("flush", absl::StrCat(moved, " bytes"));
    replays_.Keep(*call.request, *call.response);
  }
  call.reactor->Finish(ToGrpcStatus(status));
}

grpc::ServerUnaryReactor* AdminService::Snapshot(grpc::CallbackServerContext* context,
                                                 const v1::SnapshotRequest* request,
                                                 v1::SnapshotResponse* response) {
  const absl::StatusOr<bool> replay = replays_.Find(*request, response);
  if (!replay.ok() || *replay) return Finish(context, replay.status());
  if (parts_.state == nullptr) {
    return Finish(context, absl::FailedPreconditionError(
                               "state_dir is empty in the cache service's configuration: it keeps "
                               "no state"));
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status scheduled = parts_.background.Schedule([=, this] {
    const SequenceRegistry::Written written = parts_.registry.sequences().SaveAll();
    const absl::Status synced = parts_.state->Sync();
    response->set_sequences(written.sequences);
    response->set_bytes(written.bytes);
    if (synced.ok()) {
      LogInfo("snapshot", {{"sequences", written.sequences}, {"bytes", written.bytes}});
      parts_.events.Add("snapshot", absl::StrCat(written.sequences, " sequences"));
      replays_.Keep(*request, *response);
    }
    reactor->Finish(ToGrpcStatus(synced));
  });
  if (!scheduled.ok()) reactor->Finish(ToGrpcStatus(scheduled));
  return reactor;
}

grpc::ServerWriteReactor<v1::WatchResponse>* AdminService::Watch(grpc::CallbackServerContext*,
                                                                 const v1::WatchRequest* request) {
  return watches_.Start(*request);
}

void AdminService::Tick() {
  for (const heavywater::Pin& pin : parts_.registry.sequences().TakeEndedPins()) {
    LogInfo("pin ended", {{"sequence", pin.sequence}, {"owner", pin.owner}});
    parts_.events.Add("pin_ended",
                      absl::StrCat("sequence ", pin.sequence, " by \"", pin.owner, "\""));
  }
  parts_.drainer.Tick();
  watches_.Tick();
}

void AdminService::Stop() {
  parts_.drainer.Stop();
  watches_.Stop();
}

}  // namespace heavywater
