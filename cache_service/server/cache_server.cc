#include "cache_service/server/cache_server.h"

#include <prometheus/registry.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_service/base/executor.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/registry/registry.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/server/admin_service.h"
#include "cache_service/server/cache_config.h"
#include "cache_service/server/cache_metrics.h"
#include "cache_service/server/drain_gate.h"
#include "cache_service/server/group_service.h"
#include "cache_service/server/lower_tiers.h"
#include "cache_service/server/page_handlers.h"
#include "cache_service/server/page_store_service.h"
#include "cache_service/server/sequence_service.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/slab.h"
#include "cache_service/tier/stale_slabs.h"
#include "cache_service/tier/tier_mover.h"

namespace heavywater {
namespace {

constexpr char kSlabPrefix[] = "heavywater-slab-";
// For one tier below the host's: each holds a chunk of memory.
constexpr size_t kMaxReadsWaiting = 256;

RegistryOptions MakeRegistryOptions(const v1::CacheConfig& config, absl::Time now) {
  RegistryOptions options;
  options.max_sequences = config.max_sequences();
  options.max_groups = config.max_groups();
  options.sequence_lease = absl::Milliseconds(config.sequence_lease_ms());
  options.rank_lease = absl::Milliseconds(config.rank_lease_ms());
  // A rank of an earlier run must not hit a sequence or a formation of this one:
  // numbers begin at the microsecond of the start (a supervisor restarts within the
  // second), with room for a million sequences in each second, and stay below 2^53
  // for clients that count in doubles.
  const auto micros = static_cast<uint64_t>(absl::ToUnixMicros(now));
  const uint64_t first = (micros / 1'000'000 << 20) + (micros % 1'000'000 << 20) / 1'000'000;
  options.first_epoch = first;
  options.first_sequence_id = first;
  return options;
}

absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(const v1::CacheConfig& config) {
  if (config.disable_slab()) return Slab::Create("", config.host_bytes());
  int stale = RemoveStaleSlabs(kSlabPrefix);
  if (!config.slab_name().empty()) stale += RemoveStaleSlabs(config.slab_name());
  if (stale > 0) LogWarn("removed slabs that killed services had left", {{"slabs", stale}});
  if (!config.slab_name().empty()) return Slab::Create(config.slab_name(), config.host_bytes());
  // Process ids repeat in containers: the nonce makes the name unique.
  static std::atomic<int> count = 0;
  return Slab::Create(absl::StrFormat("%s%d-%x-%d", kSlabPrefix, getpid(),
                                      absl::ToUnixMicros(Clock::Real().Now()), ++count),
                      config.host_bytes());
}

}  // namespace

// In the order of dependence: what comes later uses what comes before.
struct CacheServer::Parts {
  Parts(const v1::CacheConfig& config, std::unique_ptr<Slab> slab,
        std::vector<std::unique_ptr<LowerTier>> below, Clock& clock)
      : tier_threads(below.size()),
        store(
            std::make_unique<HostPageStore>(std::move(slab)), std::move(below),
            {.high_percent = config.tier_high_percent(), .low_percent = config.tier_low_percent()},
            clock),
        mover(store.has_lower_tiers() ? std::make_unique<TierMover>(store) : nullptr),
        registry(MakeRegistryOptions(config, clock.Now()), store, clock),
        page_handlers(registry, store, config.disable_slab() ? nullptr : &store.slab(),
                      StartTierThreads()),
        groups(registry, gate),
        sequences(registry, gate),
        pages(page_handlers, gate),
        admin(registry, store, clock, ConfigToYaml(config)),
        metrics(std::make_shared<CacheMetrics>(registry, store)) {}

  std::vector<Executor*> StartTierThreads() {
    std::vector<Executor*> threads;
    for (std::unique_ptr<ThreadExecutor>& thread : tier_threads) {
      thread = std::make_unique<ThreadExecutor>(kMaxReadsWaiting);
      threads.push_back(thread.get());
    }
    return threads;
  }

  std::vector<std::unique_ptr<ThreadExecutor>> tier_threads;  // of reads, one for each tier below
  OrderedPageStore store;
  std::unique_ptr<TierMover> mover;
  Registry registry;
  DrainGate gate;
  PageHandlers page_handlers;
  GroupService groups;
  SequenceService sequences;
  PageStoreService pages;
  AdminService admin;
  std::shared_ptr<CacheMetrics> metrics;
  std::unique_ptr<ServerRuntime> runtime;
};

CacheServer::CacheServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

absl::StatusOr<std::unique_ptr<CacheServer>> CacheServer::Start(const v1::CacheConfig& config,
                                                                Clock& clock) {
  HW_RETURN_IF_ERROR(ValidateCacheConfig(config));
  HW_ASSIGN_OR_RETURN(auto slab, MakeSlab(config));
  const std::string slab_name = slab->name();
  HW_ASSIGN_OR_RETURN(auto below, OpenLowerTiers(config, clock));
  auto parts = std::make_unique<Parts>(config, std::move(slab), std::move(below), clock);
  ServerRuntimeOptions options;
  options.listen_address = config.listen_address();
  options.metrics_address = config.metrics_address();
  options.drain = absl::Milliseconds(config.drain_ms());
  HW_ASSIGN_OR_RETURN(
      parts->runtime,
      ServerRuntime::Start(options,
                           {&parts->groups, &parts->sequences, &parts->pages, &parts->admin},
                           std::make_shared<prometheus::Registry>()));
  parts->runtime->AddMetrics(parts->metrics);
  parts->runtime->SetReady(true);
  LogInfo("serving", {{"version", kVersion},
                      {"address", parts->runtime->address()},
                      {"host_bytes", config.host_bytes()},
                      {"slab", slab_name},
                      {"disk_path", config.disk_path()},
                      {"redis_address", config.redis_address()}});
  return std::unique_ptr<CacheServer>(new CacheServer(std::move(parts)));
}

CacheServer::~CacheServer() { Drain(); }

const std::string& CacheServer::address() const { return parts_->runtime->address(); }
const std::string& CacheServer::metrics_address() const {
  return parts_->runtime->metrics_address();
}
void CacheServer::PrintAddresses() const { parts_->runtime->PrintAddresses(); }
grpc::Server& CacheServer::server() { return parts_->runtime->server(); }

void CacheServer::Tick() {
  for (const SequenceId sequence : parts_->registry.Tick()) {
    LogInfo("lease of sequence ended", {{"sequence", sequence}});
  }
}

void CacheServer::BeginDrain() {
  parts_->gate.Close();
  parts_->runtime->BeginDrain();
  parts_->registry.groups().FailWaiting(parts_->gate.Check());
}

void CacheServer::Drain() {
  BeginDrain();
  parts_->runtime->Drain();
}

}  // namespace heavywater
