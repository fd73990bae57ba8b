// A rank's pages in its own memory, where its device reaches them.
#pragma once

#include <cstddef>
#include <span>

#include "cache_service/tier/local_host_tier.h"
#include "worker/backend/backend.h"

namespace heavywater {

// For a LocalHostTier of ranks on `backend`, which outlives it. On a GPU recall reads rows
// in registered memory and write-through writes them; elsewhere this does nothing.
inline HostMemoryHooks RegisteredWith(Backend& backend) {
  return {
      .on_allocated =
          [&backend](std::span<std::byte> memory) { return backend.RegisterHostMemory(memory); },
      .on_freeing =
          [&backend](std::span<std::byte> memory) { return backend.UnregisterHostMemory(memory); }};
}

}  // namespace heavywater
