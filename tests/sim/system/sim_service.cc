#include "tests/sim/system/sim_service.h"

#include <unistd.h>

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stale_slabs.h"

namespace heavywater {
namespace {

std::string NewSlabName() {
  static std::atomic<int64_t> count = 0;
  return absl::StrCat("heavywater-sim-", getpid(), "-", ++count);
}

}  // namespace

SimService::SimService(SimWorld& world, const SimServiceOptions& options)
    : world_(world), options_(options), slab_name_(NewSlabName()) {
  world_.network.SetService([this] { return process(); }, [this] { CrashIfDue(); });
}

SimService::~SimService() {
  Crash();
  RemoveStaleSlab(slab_name_);
}

absl::Status SimService::Start() {
  const bool anew = slab_bytes_ == 0;
  HW_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab,
                      anew ? Slab::Create(slab_name_, options_.host_bytes)
                           : Slab::Adopt(slab_name_, slab_bytes_, slab_nonce_));
  slab->Keep();
  slab_bytes_ = slab->object_bytes();
  slab_nonce_ = slab->nonce();
  state_.EndAfter(std::numeric_limits<int64_t>::max());
  std::vector<std::unique_ptr<LowerTier>> below;
  if (options_.disk_bytes > 0) {
    below.push_back(std::make_unique<SimTier>("disk", options_.disk_bytes, disk));
  }
  if (options_.remote_bytes > 0) {
    below.push_back(std::make_unique<SimTier>("remote", options_.remote_bytes, remote));
  }
  store_ = std::make_unique<OrderedPageStore>(
      std::make_unique<HostPageStore>(std::move(slab), &state_), std::move(below),
      OrderedStoreOptions{.max_move_bytes = 64 << 10}, world_.clock);
  RegistryOptions registry = options_.registry;
  ++num_processes_;
  // Numbers of a later process are above those of an earlier one.
  registry.first_epoch = registry.first_sequence_id = static_cast<uint64_t>(num_processes_) << 20;
  registry_ = std::make_unique<Registry>(registry, *store_, world_.clock, &state_);
  pages_ = std::make_unique<PageHandlers>(*registry_, *store_,
                                          options_.maps_slab ? &store_->slab() : nullptr);
  if (anew) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const HostPageStore::Restored restored, store_->Restore());
  return registry_->Restore(restored.live, restored.retiring);
}

void SimService::Crash() {
  pages_.reset();
  registry_.reset();
  store_.reset();
}

void SimService::CrashIfDue() {
  if (!up() || !state_.ended()) return;
  world_.trace.Note("crash of the cache service within a call");
  Crash();
}

void SimService::Background(int turns) {
  if (!up()) return;
  try {
    for (int i = 0; i < turns && store_->Turn(); ++i) {
    }
    registry_->Tick();
  } catch (const SimProcessEnded&) {
  }
  CrashIfDue();
}

}  // namespace heavywater
