// AdminService: figures, quotas, pins and drains for operators.
#pragma once

#include <string>
#include <utility>

#include "cache_service/base/clock.h"
#include "cache_service/base/executor.h"
#include "cache_service/registry/registry.h"
#include "cache_service/server/admin_stats.h"
#include "cache_service/server/drainer.h"
#include "cache_service/server/event_log.h"
#include "cache_service/server/replay_log.h"
#include "cache_service/server/watch_streams.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/state_store.h"
#include "heavywater/v1/admin.grpc.pb.h"

namespace heavywater {

// What the service works with; all must outlive it.
struct AdminParts {
  Registry& registry;
  OrderedPageStore& store;
  const AdminStats& stats;
  Drainer& drainer;
  EventLog& events;
  StateStore* state = nullptr;  // null: nothing survives
  Executor& background;         // of flushes and snapshots, which wait for disks
  Clock& clock;
};

class AdminService final : public v1::AdminService::CallbackService {
 public:
  // `config_yaml` is the configuration in effect.
  AdminService(const AdminParts& parts, std::string config_yaml)
      : parts_(parts),
        config_yaml_(std::move(config_yaml)),
        watches_(parts.stats, parts.events, parts.clock) {}

  grpc::ServerUnaryReactor* Stats(grpc::CallbackServerContext* context,
                                  const v1::StatsRequest* request,
                                  v1::StatsResponse* response) override;
  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext* context,
                                      const v1::GetConfigRequest* request,
                                      v1::GetConfigResponse* response) override;
  grpc::ServerUnaryReactor* SetQuota(grpc::CallbackServerContext* context,
                                     const v1::SetQuotaRequest* request,
                                     v1::SetQuotaResponse* response) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext* context, const v1::PinRequest* request,
                                v1::PinResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* Flush(grpc::CallbackServerContext* context,
                                  const v1::FlushRequest* request,
                                  v1::FlushResponse* response) override;
  grpc::ServerUnaryReactor* Snapshot(grpc::CallbackServerContext* context,
                                     const v1::SnapshotRequest* request,
                                     v1::SnapshotResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchRequest* request) override;

  // Time passes; several times a second.
  void Tick();
  // The process ends: no call waits or streams any more.
  void Stop();

 private:
  struct FlushCall {
    grpc::CallbackServerContext* context;
    grpc::ServerUnaryReactor* reactor;
    const v1::FlushRequest* request;
    v1::FlushResponse* response;
  };
  // A batch of a flush; it goes on with the next one behind whoever waits.
  void FlushNext(const FlushCall& call);
  void EndFlush(const FlushCall& call, const absl::Status& status);

  const AdminParts parts_;
  const std::string config_yaml_;
  WatchStreams watches_;
  ReplayLog replays_;
};

}  // namespace heavywater
