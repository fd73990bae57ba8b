#include "cache_service/tier/slab_view.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/slab_format.h"

namespace heavywater {
namespace {

template <typename T>
absl::Status CheckEqual(const std::string& name, const char* field, T got, T want) {
  if (got == want) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("slab \"", name, "\": ", field, " is ", got, ", want ", want));
}

absl::Status CheckHeader(const std::string& name, const SlabHeader& header, int64_t bytes,
                         uint64_t nonce, int32_t format_version) {
  HW_RETURN_IF_ERROR(CheckEqual(name, "magic", header.magic, kSlabMagic));
  HW_RETURN_IF_ERROR(CheckEqual(name, "format_version", header.format_version, format_version));
  HW_RETURN_IF_ERROR(CheckEqual(name, "total_bytes", header.total_bytes, bytes));
  return CheckEqual(name, "nonce", header.nonce, nonce);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SlabView>> SlabView::Map(const std::string& name, int64_t bytes,
                                                        uint64_t nonce, int32_t format_version) {
  if (format_version != kSlabFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("slab format_version is ", format_version,
                                                      ", this binary knows ", kSlabFormatVersion));
  }
  if (bytes < kSlabUnitBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("slab_bytes is ", bytes, ", want at least ", kSlabUnitBytes));
  }
  HW_ASSIGN_OR_RETURN(auto memory, SharedMemory::Open(name, bytes));
  const SlabHeader& header = *reinterpret_cast<const SlabHeader*>(memory->data());
  HW_RETURN_IF_ERROR(CheckHeader(name, header, bytes, nonce, format_version));
  return std::unique_ptr<SlabView>(new SlabView(std::move(memory)));
}

std::byte* SlabView::At(int64_t offset, int64_t bytes) {
  if (offset < kSlabUnitBytes || bytes < 0 || bytes > memory_->bytes() - offset) return nullptr;
  return memory_->data() + offset;
}

std::atomic<int64_t>* SlabView::Watermark(int64_t offset) {
  if (offset % kWatermarkCellBytes != 0) return nullptr;
  return reinterpret_cast<std::atomic<int64_t>*>(At(offset, kWatermarkCellBytes));
}

void PublishWatermark(std::atomic<int64_t>& watermark, int64_t tokens) {
  // One writer per cell: no compare-and-swap needed.
  if (tokens > watermark.load(std::memory_order_relaxed)) {
    watermark.store(tokens, std::memory_order_release);
  }
}

}  // namespace heavywater
