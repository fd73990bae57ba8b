// Recall within Attend() of CudaBackend: what the items of a batch bring to the
// device, and how what the steps found comes back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/context.h"
#include "worker/backend/cuda/recall_wave.h"

namespace heavywater::cuda {

// A wave of the batch.
struct RecallStep {
  KvDtype dtype;
  WaveShape shape;
  std::span<const WaveToken> host;  // the wave's tokens; `recall` is the item's index
  const WaveToken* tokens;          // on the device
  WaveScratch scratch;
  std::byte* memory;  // RecallScratchBytes() of the limits given to Begin()
};

class CudaRecall {
 public:
  explicit CudaRecall(CudaContext& context) : context_(context) {}

  // Once for a batch with recall, within an operation of `context`: the items' tables
  // go to the device. INVALID_ARGUMENT naming the field when the kernels cannot do an
  // item.
  absl::Status Begin(const KvShape& shape, std::span<const AttendItem> items,
                     const RecallLimits& limits, cudaStream_t stream);

  // Of a wave in which a token has recall: after the totals of its slots, before the merge.
  absl::Status Pick(const RecallStep& step, cudaStream_t stream);
  // After the merge. Results reach the spans of RecallView when the stream is synchronised.
  absl::Status Report(const RecallStep& step, cudaStream_t stream);

 private:
  absl::Status Upload(const KvShape& shape, std::span<const AttendItem> items,
                      std::vector<RecallItem>& device_items);
  RecallWave WaveOf(const RecallStep& step) const;
  absl::Status ReportPicks(const RecallStep& step, const RecallWave& wave, int64_t first,
                           int64_t count, cudaStream_t stream);

  CudaContext& context_;
  // Of the batch under way.
  const KvShape* shape_ = nullptr;
  std::span<const AttendItem> items_;
  RecallLimits limits_;
  RecallWave wave_ = {};
};

}  // namespace heavywater::cuda
