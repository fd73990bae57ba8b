// Host memory that the device reaches: pages of the host tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "cache_service/tier/slab_view.h"
#include "worker/backend/backend.h"

namespace heavywater {

// Registered with a backend as long as it lives. The backend may be null: none that
// needs to know. Backends register on any thread.
class HostRegistration {
 public:
  static absl::StatusOr<std::unique_ptr<HostRegistration>> Create(std::span<std::byte> memory,
                                                                  Backend* backend);
  ~HostRegistration();
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

 private:
  HostRegistration(std::span<std::byte> memory, Backend* backend)
      : memory_(memory), backend_(backend) {}
  const std::span<std::byte> memory_;
  Backend* const backend_;
};

// Memory of this process, zeroed, in whole pages of the system's: two blocks never
// share one, which could not be registered twice.
class RegisteredMemory {
 public:
  // The backend's errors; RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<std::unique_ptr<RegisteredMemory>> Create(int64_t bytes, Backend* backend);
  std::byte* data() { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::unique_ptr<HostRegistration> registration_;  // ends before the memory does
};

// The slab, registered until its last owner lets go of it.
absl::StatusOr<std::shared_ptr<SlabView>> RegisterSlab(std::unique_ptr<SlabView> slab,
                                                       Backend* backend);

}  // namespace heavywater
