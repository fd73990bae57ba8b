#include "worker/server/registered_memory.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

constexpr int64_t kPageBytes = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<HostRegistration>> HostRegistration::Create(
    std::span<std::byte> memory, Backend* backend) {
  if (backend != nullptr) HW_RETURN_IF_ERROR(backend->RegisterHostMemory(memory));
  return std::unique_ptr<HostRegistration>(new HostRegistration(memory, backend));
}

HostRegistration::~HostRegistration() {
  if (backend_ == nullptr) return;
  const absl::Status ended = backend_->UnregisterHostMemory(memory_);
  if (!ended.ok()) LogWarn("host memory stays registered", {{"error", ended.ToString()}});
}

void RegisteredMemory::Free::operator()(std::byte* memory) const { std::free(memory); }

absl::StatusOr<std::unique_ptr<RegisteredMemory>> RegisteredMemory::Create(int64_t bytes,
                                                                           Backend* backend) {
  const auto whole = static_cast<size_t>((bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  auto block = std::make_unique<RegisteredMemory>();
  block->memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, whole)));
  if (block->memory_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no host memory for ", whole, " bytes"));
  }
  std::memset(block->data(), 0, whole);
  HW_ASSIGN_OR_RETURN(block->registration_,
                      HostRegistration::Create({block->data(), whole}, backend));
  return block;
}

absl::StatusOr<std::shared_ptr<SlabView>> RegisterSlab(std::unique_ptr<SlabView> slab,
                                                       Backend* backend) {
  HW_ASSIGN_OR_RETURN(auto registration, HostRegistration::Create(slab->memory(), backend));
  // The deleter owns the registration and ends it while the slab is still mapped.
  std::shared_ptr<HostRegistration> shared = std::move(registration);
  return std::shared_ptr<SlabView>(slab.release(), [shared](SlabView* view) mutable {
    shared.reset();
    delete view;
  });
}

}  // namespace heavywater
