// Work that waits for a tier, on that tier's thread.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/executor.h"
#include "cache_service/tier/page_place.h"

namespace heavywater {

// At once for the host's tier, or one without a thread: `tier_threads` are those below the
// host's, in their order. UNAVAILABLE: too much waits for it already.
inline absl::Status RunInTier(const std::vector<Executor*>& tier_threads, int tier,
                              std::function<void()> work) {
  if (tier == kHostTier || tier > static_cast<int>(tier_threads.size())) {
    work();
    return absl::OkStatus();
  }
  const absl::Status queued = tier_threads[tier - 1]->Schedule(std::move(work));
  if (queued.ok()) return queued;
  return absl::UnavailableError(
      absl::StrCat("tier ", tier, " below host memory: ", queued.message()));
}

}  // namespace heavywater
