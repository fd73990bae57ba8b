#include "cache_service/server/cache_server.h"

#include <prometheus/registry.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/executor.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/registry/registry.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/server_security.h"
#include "cache_service/server/admin_service.h"
#include "cache_service/server/blob_service.h"
#include "cache_service/server/cache_config.h"
#include "cache_service/server/cache_metrics.h"
#include "cache_service/server/cluster_link.h"
#include "cache_service/server/drain_gate.h"
#include "cache_service/server/durable_state.h"
#include "cache_service/server/group_service.h"
#include "cache_service/server/lower_tiers.h"
#include "cache_service/server/page_handlers.h"
#include "cache_service/server/page_store_service.h"
#include "cache_service/server/sequence_service.h"
#include "cache_service/tier/blob_store.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/slab.h"
#include "cache_service/tier/tier_mover.h"

namespace heavywater {
namespace {

void LogTierChange(const char* tier, const absl::Status& status) {
  if (status.ok()) return LogInfo("tier takes pages again", {{"tier", tier}});
  LogWarn("tier refuses pages: they stay, or go to the next one",
          {{"tier", tier}, {"error", status.ToString()}});
}

// For one tier below the host's: each holds a chunk of memory.
constexpr size_t kMaxReadsWaiting = 256;
constexpr size_t kMaxBackgroundTasks = 64;
// Large ones hold up neither heartbeats, which have gRPC's threads, nor sequences that need
// nothing from the tiers below, which are opened on threads of their own.
constexpr size_t kMaxBringUps = 256;
constexpr int kBringUpThreads = 4;
constexpr size_t kMaxOpens = 256;
constexpr int kOpenThreads = 2;

// A rank of an earlier run must not hit a sequence or a formation of this one:
// numbers begin at the microsecond of the start (a supervisor restarts within the
// second), with room for a million sequences in each second, and stay below 2^53
// for clients that count in doubles.
uint64_t FirstNumber(absl::Time now) {
  const auto micros = static_cast<uint64_t>(absl::ToUnixMicros(now));
  return (micros / 1'000'000 << 20) + (micros % 1'000'000 << 20) / 1'000'000;
}

RegistryOptions MakeRegistryOptions(const v1::CacheConfig& config, absl::Time now,
                                    const ClusterLink& cluster) {
  RegistryOptions options;
  options.max_sequences = config.max_sequences();
  options.max_groups = config.max_groups();
  options.sequence_lease = absl::Milliseconds(config.sequence_lease_ms());
  options.rank_lease = absl::Milliseconds(config.rank_lease_ms());
  options.suspend_ttl = absl::Milliseconds(config.suspend_ttl_ms());
  options.max_suspended_bytes = config.host_bytes() / 2;
  options.max_pins = config.max_pins();
  options.tenant_defaults = {.host_bytes = config.tenant_host_bytes(),
                             .lower_bytes = config.tenant_lower_bytes(),
                             .sequences = config.tenant_sequences()};
  options.first_epoch = FirstNumber(now);
  options.first_sequence_id = options.first_epoch;
  cluster.AddTo(options);
  return options;
}

}  // namespace

// In the order of dependence: what comes later uses what comes before.
struct CacheServer::Parts {
  Parts(const v1::CacheConfig& config, const Access& access, DurableState durable,
        std::vector<std::unique_ptr<LowerTier>> below, std::unique_ptr<ClusterLink> others,
        Clock& clock)
      : cluster(std::move(others)),
        drain(absl::Milliseconds(config.drain_ms())),
        state(std::move(durable.store)),
        tier_threads(below.size()),
        events(clock),
        background(kMaxBackgroundTasks),
        bring_ups(kMaxBringUps, kBringUpThreads),
        opens(kMaxOpens, kOpenThreads),
        store(std::make_unique<HostPageStore>(std::move(durable.slab), state.get()),
              std::move(below),
              {.high_percent = config.tier_high_percent(),
               .low_percent = config.tier_low_percent(),
               .code_pages = config.demoted_dtype() == "int8",
               .on_change = [this](const char* tier,
                                   const absl::Status& status) { TierChanged(tier, status); }},
              clock),
        registry(MakeRegistryOptions(config, clock.Now(), *cluster), store, clock, state.get()),
        blob_store(store,
                   {.max_bytes = config.blob_bytes(),
                    .max_writing_bytes = config.host_bytes() / 4,
                    .first_sequence = FirstNumber(clock.Now())},
                   state.get()),
        page_handlers(registry, store, config.disable_slab() ? nullptr : &store.slab(),
                      StartTierThreads()),
        groups(registry, gate),
        sequences(registry, gate, access, bring_ups, opens, cluster->bring()),
        pages(page_handlers, gate, access),
        blobs(blob_store, gate, TierThreads(), absl::Milliseconds(config.blob_stall_ms()), clock),
        drainer(registry, gate, clock),
        stats(registry, store, blob_store, drainer, clock),
        admin({.registry = registry,
               .store = store,
               .stats = stats,
               .drainer = drainer,
               .events = events,
               .state = state.get(),
               .background = background,
               .clock = clock},
              ConfigToYaml(config)),
        metrics(std::make_shared<CacheMetrics>(registry, store, blob_store, gate, state.get())) {}

  void TierChanged(const char* tier, const absl::Status& status) {
    LogTierChange(tier, status);
    events.Add("tier", absl::StrCat(tier, status.ok() ? " takes pages again"
                                                      : absl::StrCat(": ", status.ToString())));
  }

  std::vector<Executor*> StartTierThreads() {
    for (std::unique_ptr<ThreadExecutor>& thread : tier_threads) {
      thread = std::make_unique<ThreadExecutor>(kMaxReadsWaiting);
    }
    return TierThreads();
  }
  std::vector<Executor*> TierThreads() const {
    std::vector<Executor*> threads;
    for (const std::unique_ptr<ThreadExecutor>& thread : tier_threads) {
      threads.push_back(thread.get());
    }
    return threads;
  }

  // Before anything else is called.
  absl::Status Restore() {
    HW_ASSIGN_OR_RETURN(const HostPageStore::Restored restored, store.Restore());
    absl::StatusOr<std::vector<SequenceId>> sequences = blob_store.Restore(restored.live);
    absl::Status known = sequences.status();
    if (known.ok()) known = registry.Restore(*sequences, restored.retiring);
    if (!known.ok()) {
      return absl::DataLossError(known.message());  // nothing but its records can be wrong
    }
    const PageStoreStats stats = store.Stats();
    LogInfo("goes on where an earlier process ended",
            {{"sequences", registry.sequences().num_sequences()},
             {"groups", registry.groups().num_groups()},
             {"values", blob_store.Stats().blobs},
             {"pages", stats.pages},
             {"pages_below", static_cast<int64_t>(restored.below.size())},
             {"used_bytes", stats.used_bytes}});
    return absl::OkStatus();
  }

  const std::unique_ptr<ClusterLink> cluster;  // the registry tells it; stopped before that ends
  const absl::Duration drain;
  bool flushed = false;
  std::unique_ptr<StateStore> state;
  std::vector<std::unique_ptr<ThreadExecutor>> tier_threads;  // of reads, one for each tier below
  EventLog events;
  ThreadExecutor background;  // of admin calls that wait for disks
  ThreadExecutor bring_ups;   // of calls about sequences that may wait for the tiers below
  ThreadExecutor opens;       // of sequences that do not
  OrderedPageStore store;
  Registry registry;
  BlobStore blob_store;
  DrainGate gate;
  PageHandlers page_handlers;
  GroupService groups;
  SequenceService sequences;
  PageStoreService pages;
  BlobService blobs;
  Drainer drainer;
  AdminStats stats;
  AdminService admin;
  std::shared_ptr<CacheMetrics> metrics;
  std::unique_ptr<TierMover> mover;
  std::unique_ptr<ServerSecurity> security;  // the services ask it: they are ended before
  std::unique_ptr<ServerRuntime> runtime;
};

CacheServer::CacheServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

absl::StatusOr<std::unique_ptr<CacheServer::Parts>> CacheServer::MakeParts(
    const v1::CacheConfig& config, const Access& access, Clock& clock) {
  HW_ASSIGN_OR_RETURN(DurableState state, OpenDurableState(config));
  while (true) {
    const bool restores = state.restores;
    HW_ASSIGN_OR_RETURN(auto below, OpenLowerTiers(config, state, clock));
    HW_ASSIGN_OR_RETURN(auto cluster, ClusterLink::Open(config, state.redis_store_id));
    auto parts = std::make_unique<Parts>(config, access, std::move(state), std::move(below),
                                         std::move(cluster), clock);
    if (!restores) return parts;
    const absl::Status restored = parts->Restore();
    if (restored.ok()) return parts;
    // Anything else may pass, and the state with its slab stays for the next start.
    if (!absl::IsDataLoss(restored)) return restored;
    parts.reset();  // what it holds is opened anew
    HW_ASSIGN_OR_RETURN(state, DiscardDurableState(config, restored));
  }
}

absl::StatusOr<std::unique_ptr<CacheServer>> CacheServer::Start(const v1::CacheConfig& config,
                                                                Clock& clock) {
  HW_RETURN_IF_ERROR(ValidateCacheConfig(config));
  auto metrics = std::make_shared<prometheus::Registry>();
  HW_ASSIGN_OR_RETURN(auto security, ServerSecurity::Create(ServerSecurityOf(config), metrics));
  HW_ASSIGN_OR_RETURN(auto parts, MakeParts(config, security->access(), clock));
  parts->security = std::move(security);
  if (parts->store.has_lower_tiers()) parts->mover = std::make_unique<TierMover>(parts->store);
  ServerRuntimeOptions options;
  options.listen_address = config.listen_address();
  options.metrics_address = config.metrics_address();
  options.drain = absl::Milliseconds(config.drain_ms());
  options.max_connections = config.max_connections();
  options.max_connections_per_peer = config.max_connections_per_peer();
  options.max_calls_per_connection = config.max_calls_per_connection();
  options.security = parts->security.get();
  HW_ASSIGN_OR_RETURN(
      parts->runtime,
      ServerRuntime::Start(
          options, {&parts->groups, &parts->sequences, &parts->pages, &parts->blobs, &parts->admin},
          std::move(metrics)));
  parts->runtime->AddMetrics(parts->metrics);
  if (parts->cluster->metrics() != nullptr) parts->runtime->AddMetrics(parts->cluster->metrics());
  parts->cluster->Start(parts->runtime->address(), parts->registry, parts->store, clock);
  parts->drainer.SetReadiness(
      [runtime = parts->runtime.get()](bool ready) { runtime->SetReady(ready); });
  parts->runtime->SetReady(true);
  LogInfo("serving", {{"version", kVersion},
                      {"address", parts->runtime->address()},
                      {"tls", parts->security->uses_tls() ? "yes" : "no"},
                      {"tokens", parts->security->access().has_tokens() ? "yes" : "no"},
                      {"host_bytes", config.host_bytes()},
                      {"slab", parts->store.slab().name()},
                      {"state_dir", config.state_dir()},
                      {"disk_path", config.disk_path()},
                      {"redis_address", config.redis_address()}});
  return std::unique_ptr<CacheServer>(new CacheServer(std::move(parts)));
}

CacheServer::~CacheServer() {
  Drain();
  parts_->cluster->Stop();
}

const std::string& CacheServer::address() const { return parts_->runtime->address(); }
const std::string& CacheServer::metrics_address() const {
  return parts_->runtime->metrics_address();
}
void CacheServer::PrintAddresses() const { parts_->runtime->PrintAddresses(); }
grpc::Server& CacheServer::server() { return parts_->runtime->server(); }

void CacheServer::Tick() {
  for (const SequenceId sequence : parts_->registry.Tick()) {
    LogInfo("lease of sequence ended", {{"sequence", sequence}});
    parts_->events.Add("lease_ended", absl::StrCat("sequence ", sequence));
  }
  parts_->admin.Tick();
  parts_->blobs.Tick();
}

void CacheServer::BeginDrain() {
  parts_->gate.Close();
  parts_->runtime->BeginDrain();
  parts_->registry.groups().FailWaiting(parts_->gate.Check());
  parts_->admin.Stop();
}

void CacheServer::Drain() {
  BeginDrain();
  parts_->runtime->Drain();
  if (!std::exchange(parts_->flushed, true)) parts_->cluster->Flush(parts_->drain);
}

}  // namespace heavywater
