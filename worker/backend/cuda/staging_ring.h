// Parameters of operations (item lists, slots, addresses) on their way to kernels: the
// caller's memory is copied to pinned memory before the call returns, and from there
// to the device by the stream.
//
// The ring consists of segments. A segment is used again once the streams that used
// it have passed the end of the operation that used it last; the host waits for that,
// which it only does when it is a whole ring ahead of the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/status.h"

namespace heavywater::cuda {

class StagingRing {
 public:
  static constexpr int64_t kSegmentBytes = int64_t{1} << 20;
  static constexpr int kSegments = 8;
  // One Take() at most; an operation that has more to say says it in pieces, and no
  // more than half the ring.
  static constexpr int64_t kMaxBytes = kSegmentBytes;
  // Of all captured graphs together: what a graph reads is never overwritten.
  static constexpr int64_t kCaptureBytes = int64_t{2} << 20;

  static absl::StatusOr<std::unique_ptr<StagingRing>> Create();
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Around each operation of the backend; not nested. What is taken in between may be
  // used by work that is enqueued on `stream` before End().
  absl::Status Begin(cudaStream_t stream);
  // The operation also uses what it took on another stream.
  void AlsoUsedOn(cudaStream_t stream);
  absl::Status End();

  struct Place {
    std::byte* host = nullptr;    // pinned: fill it before Send()
    std::byte* device = nullptr;  // 256-byte aligned
    int64_t bytes = 0;
  };
  // RESOURCE_EXHAUSTED above kMaxBytes, or when captured graphs hold all they may.
  absl::StatusOr<Place> Take(int64_t bytes);
  // Copies the place's bytes to its device memory, on the operation's stream.
  absl::Status Send(const Place& place);

  // Take, fill and Send.
  template <typename T>
  absl::StatusOr<const T*> Upload(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    HW_ASSIGN_OR_RETURN(const Place place, Take(static_cast<int64_t>(values.size_bytes())));
    std::memcpy(place.host, values.data(), values.size_bytes());
    HW_RETURN_IF_ERROR(Send(place));
    return reinterpret_cast<const T*>(place.device);
  }

 private:
  struct Use {
    cudaStream_t stream;
    cudaEvent_t event;
  };
  struct Segment {
    std::vector<cudaStream_t> streams;  // of operations that used it since it was entered
    std::vector<Use> uses;              // recorded when it was left
    bool of_operation = false;          // the operation under way uses it
    bool left = false;
  };

  StagingRing() = default;
  absl::Status Advance();
  absl::Status Record(Segment& segment);
  absl::Status Await(Segment& segment);
  absl::StatusOr<Place> TakeForCapture(int64_t bytes);

  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  std::vector<Segment> segments_;
  std::vector<cudaEvent_t> idle_events_;
  int current_ = 0;
  int64_t used_ = 0;  // of the current segment
  int64_t captured_ = 0;
  std::vector<cudaStream_t> streams_;  // of the operation under way
  bool capturing_ = false;
};

}  // namespace heavywater::cuda
