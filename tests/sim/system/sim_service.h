// The cache service as a process that ends at any moment and starts again: the real
// registry and the real store over the state, the slab and the media that it left behind.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "cache_service/registry/registry.h"
#include "cache_service/server/page_handlers.h"
#include "cache_service/tier/ordered_page_store.h"
#include "tests/cache_service/tier/memory_state.h"
#include "tests/sim/system/sim_tier.h"
#include "tests/sim/system/sim_world.h"

namespace heavywater {

struct SimServiceOptions {
  int64_t host_bytes = int64_t{1} << 20;
  int64_t disk_bytes = 0;    // 0: there is none
  int64_t remote_bytes = 0;  // likewise
  bool maps_slab = true;     // or ranks stream their pages
  RegistryOptions registry = {};
};

// What is kept outside of the process, until it ends in the middle of something.
class SimState final : public StateStore {
 public:
  void Apply(const StateBatch& batch) override {
    if (applies_left_ == 0) {
      // What unwinds now has no more to say.
      if (std::exchange(dead_, true)) return;
      throw SimProcessEnded();
    }
    --applies_left_;
    state_.Apply(batch);
  }
  absl::Status broken() const override { return absl::OkStatus(); }
  absl::Status ForEach(const std::string& prefix, const Visit& visit) const override {
    return state_.ForEach(prefix, visit);
  }
  void EndAfter(int64_t applies) {
    applies_left_ = applies;
    dead_ = false;
  }
  bool ended() const { return applies_left_ == 0; }
  size_t size() const { return state_.Records().size(); }

 private:
  MemoryState state_;
  int64_t applies_left_ = std::numeric_limits<int64_t>::max();
  bool dead_ = false;
};

class SimService {
 public:
  SimService(SimWorld& world, const SimServiceOptions& options);
  ~SimService();

  // A process, over what the one before left.
  absl::Status Start();
  void Crash();
  // In the middle of a call: once it has kept so many more changes.
  void CrashAfter(int64_t applies) { state_.EndAfter(applies); }
  // To be called after each call: whether it has ended within.
  void CrashIfDue();

  bool up() const { return registry_ != nullptr; }
  int64_t process() const { return up() ? num_processes_ : 0; }
  Registry& registry() { return *registry_; }
  SequenceRegistry& sequences() { return registry_->sequences(); }
  PageHandlers& pages() { return *pages_; }
  OrderedPageStore& store() { return *store_; }
  // What its threads do meanwhile.
  void Background(int turns);

  SimMedium disk;
  SimMedium remote;
  const SimServiceOptions& options() const { return options_; }

 private:
  SimWorld& world_;
  const SimServiceOptions options_;
  const std::string slab_name_;
  int64_t slab_bytes_ = 0;  // 0: there is none yet
  uint64_t slab_nonce_ = 0;
  SimState state_;
  int64_t num_processes_ = 0;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<PageHandlers> pages_;
};

}  // namespace heavywater
