// Gives memory back to the system that the allocator keeps after a crowd has gone.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "cache_service/security/periodic.h"

namespace heavywater {

// Bytes that the allocator holds and nobody uses. 0 where it does not tell.
int64_t UnusedHeapBytes();

// As long as it lives: every `interval` in which the allocator holds more than `keep_bytes`
// that nobody uses, whole pages of them go back. It stays mapped: RSS falls, not the size.
class MemoryTrim {
 public:
  explicit MemoryTrim(int64_t keep_bytes = int64_t{64} << 20,
                      absl::Duration interval = absl::Seconds(5));

 private:
  Periodic periodic_;
};

}  // namespace heavywater
