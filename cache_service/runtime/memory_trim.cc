#include "cache_service/runtime/memory_trim.h"

#include <malloc.h>

namespace heavywater {
namespace {

void Trim([[maybe_unused]] int64_t keep_bytes) {
#if defined(__GLIBC__)
  // Its arenas give only their top back by themselves: one block that lives on keeps all below.
  if (UnusedHeapBytes() > keep_bytes) malloc_trim(0);
#endif
}

}  // namespace

int64_t UnusedHeapBytes() {
#if defined(__GLIBC__)
  return static_cast<int64_t>(mallinfo2().fordblks);
#else
  return 0;
#endif
}

MemoryTrim::MemoryTrim(int64_t keep_bytes, absl::Duration interval)
    : periodic_(interval, [keep_bytes] { Trim(keep_bytes); }) {}

}  // namespace heavywater
