// The stream on which new rows go from their slots to the host tier, beside the
// stream that goes on computing.
//
// Hazards, and what rules them out:
//  - A copy reads its slots after the append wrote them: Fork().
//  - Nothing overwrites rows that a copy has yet to read: every operation that writes K
//    and V or raw memory joins first (Append, GatherSlots, PromoteSlots, CopyToDevice,
//    CopyOnDevice, Zero). ReleaseSlots writes tables only, which no copy reads. Freeing
//    memory waits for the whole device.
//  - Nothing reads host rows that a copy has yet to write: operations that read host
//    pages join first (EncodePages, ChooseChannels, Attend with recall, PromoteSlots);
//    Synchronize() joins, so the host may read them then. Two copies of the same row are
//    in order, on this one stream.
//  - The lists that a copy's kernel reads lie in the staging ring: the ring is told of
//    this stream (StagingRing::AlsoUsedOn).
//  - A captured graph must end joined: whoever captures ends with an operation that
//    joins, and calls Synchronize() before it begins. Copies in a graph are the graph's:
//    work outside is ordered behind them by the stream that launches it.
// A join costs nothing when no copy is under way that the stream does not wait for
// already; the copy of one layer is done long before the next layer's append.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater::cuda {

class WriteThrough {
 public:
  static absl::StatusOr<std::unique_ptr<WriteThrough>> Create();
  ~WriteThrough();
  WriteThrough(const WriteThrough&) = delete;
  WriteThrough& operator=(const WriteThrough&) = delete;

  cudaStream_t stream() const { return stream_; }
  // What is enqueued on stream() next runs after all that `from` has now.
  absl::Status Fork(cudaStream_t from);
  // Call when the copies are enqueued.
  absl::Status Enqueued();
  // What is enqueued on `to` next runs after all copies so far.
  absl::Status Join(cudaStream_t to);

 private:
  WriteThrough() = default;
  // Of the capture under way on the stream; 0: none.
  static absl::StatusOr<unsigned long long> CaptureOf(cudaStream_t stream);

  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t copied_ = nullptr;
  int64_t copies_ = 0;
  cudaEvent_t captured_copied_ = nullptr;
  unsigned long long capture_ = 0;  // whose copies that event follows; 0: none
  std::vector<std::pair<cudaStream_t, int64_t>> joined_;  // copies that a stream waits for
};

}  // namespace heavywater::cuda
