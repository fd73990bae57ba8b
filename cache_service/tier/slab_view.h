// The slab as a rank sees it: mapped by name, checked, written in place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "cache_service/tier/shared_memory.h"

namespace heavywater {

// Thread safe: each page and each watermark has one writer. Mapped pages stay
// valid as long as the view lives, also when the owner has gone.
class SlabView {
 public:
  // As AttachResponse says. NOT_FOUND when the name does not exist here (the
  // service runs on another node); FAILED_PRECONDITION naming size, version or
  // nonce when it is another slab. In both cases the rank streams its pages.
  static absl::StatusOr<std::unique_ptr<SlabView>> Map(const std::string& name, int64_t bytes,
                                                       uint64_t nonce, int32_t format_version);

  // Null unless [offset, offset + bytes) lies within the slab's pages.
  std::byte* At(int64_t offset, int64_t bytes);

  // This rank's committed watermark at ReserveResponse.watermark_offset, null
  // when the offset is not a cell's.
  std::atomic<int64_t>* Watermark(int64_t offset);

  int64_t bytes() const { return memory_->bytes(); }
  // The whole mapping: for a device that must know memory before it reaches it.
  std::span<std::byte> memory() { return {memory_->data(), static_cast<size_t>(memory_->bytes())}; }

 private:
  explicit SlabView(std::unique_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}

  std::unique_ptr<SharedMemory> memory_;
};

// Raises a watermark: everything written before is visible to whoever reads
// below it. Never lowers it.
void PublishWatermark(std::atomic<int64_t>& watermark, int64_t tokens);

}  // namespace heavywater
