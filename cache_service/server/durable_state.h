// What outlives the service's process: its state folder, and the slab that the state
// speaks of.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/slab.h"
#include "cache_service/tier/state_store.h"
#include "heavywater/v1/cache_state.pb.h"
#include "heavywater/v1/config.pb.h"

namespace heavywater {

struct DurableState {
  std::unique_ptr<Slab> slab = nullptr;
  // Without state_dir null, and nothing outlives the process.
  std::unique_ptr<StateStore> store = nullptr;
  // Redis keys begin with it.
  std::string redis_store_id = {};
  // There was a state, and this is its slab: to be taken over.
  bool restores = false;
};

// Takes over what an earlier process has left, or begins anew: where nothing is there,
// and where what is there does not fit together (another version, damaged, of another
// slab or configuration, changes missing); the log then says why. FAILED_PRECONDITION,
// UNAVAILABLE: state_dir cannot be used, and is not touched.
absl::StatusOr<DurableState> OpenDurableState(const v1::CacheConfig& config);

// Likewise, but begins anew: what is there turned out not to fit, for the reason that
// the log then names.
absl::StatusOr<DurableState> DiscardDurableState(const v1::CacheConfig& config,
                                                 const absl::Status& why);

}  // namespace heavywater
