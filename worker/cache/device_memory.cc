#include "worker/cache/device_memory.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

bool IsKv(MemoryKind kind) {
  return kind == MemoryKind::kSlots || kind == MemoryKind::kScores || kind == MemoryKind::kTables ||
         kind == MemoryKind::kSketches || kind == MemoryKind::kPromptKv;
}

void Add(MemoryGauge& gauge, int64_t bytes) {
  gauge.current_bytes += bytes;
  HW_CHECK(gauge.current_bytes >= 0);
  gauge.peak_bytes = std::max(gauge.peak_bytes, gauge.current_bytes);
}

}  // namespace

std::string_view MemoryKindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kSlots:
      return "slots";
    case MemoryKind::kScores:
      return "scores";
    case MemoryKind::kTables:
      return "tables";
    case MemoryKind::kSketches:
      return "sketches";
    case MemoryKind::kPromptKv:
      return "prompt_kv";
    case MemoryKind::kPromptHidden:
      return "prompt_hidden";
    case MemoryKind::kWorkspace:
      return "workspace";
    case MemoryKind::kScratch:
      return "scratch";
  }
  HW_CHECK(false && "memory kind without a name");
  return "";
}

DeviceMemory::DeviceMemory(Backend& backend, int64_t limit_bytes)
    : backend_(backend), limit_bytes_(limit_bytes) {}

DeviceMemory::~DeviceMemory() { HW_CHECK(reserved_bytes_ == 0 && allocated_bytes_ == 0); }

int64_t DeviceMemory::free_bytes() const {
  if (limit_bytes_ == 0) return std::numeric_limits<int64_t>::max();
  return limit_bytes_ - reserved_bytes_;
}

absl::Status DeviceMemory::Exhausted(int64_t bytes, const std::string& what) const {
  return absl::ResourceExhaustedError(absl::StrCat(what, " needs ", bytes,
                                                   " bytes of device memory, limit ", limit_bytes_,
                                                   ", in use ", reserved_bytes_));
}

absl::StatusOr<DeviceMemory::Reservation> DeviceMemory::Reserve(int64_t bytes,
                                                                const std::string& what) {
  Reservation reservation;
  reservation.memory_ = this;
  HW_RETURN_IF_ERROR(reservation.Extend(bytes, what));
  return reservation;
}

DeviceMemory::Reservation& DeviceMemory::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Resize(0);
  memory_ = std::exchange(other.memory_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

absl::Status DeviceMemory::Reservation::Extend(int64_t bytes, const std::string& what) {
  const int64_t more = bytes - bytes_;
  HW_CHECK(memory_ != nullptr && more >= 0);
  if (!memory_->Fits(more)) return memory_->Exhausted(more, what);
  memory_->reserved_bytes_ += more;
  bytes_ = bytes;
  return absl::OkStatus();
}

void DeviceMemory::Reservation::Resize(int64_t smaller_bytes) {
  if (memory_ == nullptr) return;
  HW_CHECK(smaller_bytes <= bytes_);
  memory_->reserved_bytes_ -= bytes_ - smaller_bytes;
  bytes_ = smaller_bytes;
}

void DeviceMemory::Count(MemoryKind kind, int64_t bytes) {
  Add(gauges_[static_cast<int>(kind)], bytes);
  if (IsKv(kind)) Add(kv_, bytes);
  if (kind != MemoryKind::kPromptHidden) allocated_bytes_ += bytes;
}

absl::StatusOr<DeviceBuffer> DeviceMemory::Allocate(MemoryKind kind, int64_t bytes) {
  if (kind != MemoryKind::kPromptHidden && allocated_bytes_ + bytes > reserved_bytes_) {
    return absl::InternalError(
        absl::StrCat("allocating ", bytes, " bytes of ", std::string(MemoryKindName(kind)),
                     " with ", allocated_bytes_, " of ", reserved_bytes_, " reserved in use"));
  }
  HW_ASSIGN_OR_RETURN(DeviceBuffer memory, backend_.Allocate(bytes));
  Count(kind, bytes);
  // The backend's buffer lives inside the release function of the counted one.
  std::byte* address = memory.As<std::byte>().device_address();
  auto owner = std::make_shared<DeviceBuffer>(std::move(memory));
  return DeviceBuffer(address, bytes, [this, kind, bytes, owner](std::byte*) mutable {
    Count(kind, -bytes);
    owner.reset();
  });
}

}  // namespace heavywater
