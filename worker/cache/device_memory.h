// What a rank may take of its device, and what it has taken.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/backend/device_buffer.h"

namespace heavywater {

enum class MemoryKind {
  kSlots,         // keys and values of residents
  kScores,        // ledger and gains
  kTables,        // positions
  kSketches,      // of demoted keys, with recall's tables
  kPromptKv,      // one layer's whole KV while a prompt runs, its tables included
  kPromptHidden,  // a prompt's hidden states: counted, outside the limit
  kWorkspace,     // a step's rows and its reduce buffer
  kScratch,       // what the backend's attention works in
};
inline constexpr int kNumMemoryKinds = 8;
std::string_view MemoryKindName(MemoryKind kind);

struct MemoryGauge {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
};

// Admission reserves, allocation counts. One thread.
//
// A reservation is a promise of bytes within the limit; what is allocated (but
// for kPromptHidden) never exceeds what is reserved: Allocate() fails instead.
class DeviceMemory {
 public:
  // `limit_bytes` 0: no limit.
  DeviceMemory(Backend& backend, int64_t limit_bytes);
  ~DeviceMemory();  // every reservation and buffer must be gone

  // Gives its bytes back when destroyed. Move only.
  class Reservation {
   public:
    Reservation() = default;
    ~Reservation() { Resize(0); }
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept;
    int64_t bytes() const { return bytes_; }
    // To less: always. To more: RESOURCE_EXHAUSTED as Reserve(), unchanged.
    absl::Status Extend(int64_t bytes, const std::string& what);
    void Resize(int64_t smaller_bytes);

   private:
    friend class DeviceMemory;
    DeviceMemory* memory_ = nullptr;
    int64_t bytes_ = 0;
  };

  // RESOURCE_EXHAUSTED naming need, limit and what is in use.
  absl::StatusOr<Reservation> Reserve(int64_t bytes, const std::string& what);
  // Memory from the backend, zeroed, counted until the buffer is destroyed.
  absl::StatusOr<DeviceBuffer> Allocate(MemoryKind kind, int64_t bytes);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t free_bytes() const;  // under the limit; INT64_MAX without one
  const MemoryGauge& gauge(MemoryKind kind) const { return gauges_[static_cast<int>(kind)]; }
  // Slots, scores, tables, sketches and a running prompt's layer.
  const MemoryGauge& kv_gauge() const { return kv_; }
  Backend& backend() { return backend_; }

 private:
  bool Fits(int64_t more_bytes) const { return more_bytes <= free_bytes(); }
  absl::Status Exhausted(int64_t bytes, const std::string& what) const;
  void Count(MemoryKind kind, int64_t bytes);

  Backend& backend_;
  const int64_t limit_bytes_;
  int64_t reserved_bytes_ = 0;
  int64_t allocated_bytes_ = 0;  // of reservations
  std::array<MemoryGauge, kNumMemoryKinds> gauges_;
  MemoryGauge kv_;
};

}  // namespace heavywater
