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

// A wave of a batch.
struct RecallStep {
  KvDtype dtype;
  WaveShape shape;
  std::span<const WaveToken> host;  // the wave's tokens; `recall` is the item's number
  const WaveToken* tokens;          // on the device
  WaveScratch scratch;
};

class CudaRecall {
 public:
  explicit CudaRecall(CudaContext& context) : context_(context) {}

  // Before each wave in which a token has recall, within its operation of `context`: the
  // tables of its items go to the device. `memory` has RecallScratchBytes() of the
  // limits, which are those of the whole batch. INVALID_ARGUMENT naming the field when
  // the kernels cannot do an item.
  absl::Status Begin(const KvShape& shape, std::span<const AttendItem> items,
                     std::span<const WaveToken> wave, const RecallLimits& limits, std::byte* memory,
                     cudaStream_t stream);
  // After the totals of the slots, before the merge.
  absl::Status Pick(const RecallStep& step, cudaStream_t stream);
  // After the merge. Results reach the spans of RecallView when the stream is synchronised.
  absl::Status Report(const RecallStep& step, cudaStream_t stream);

 private:
  absl::Status Upload(const KvShape& shape, std::span<const AttendItem> items,
                      std::vector<RecallItem>& device_items);

  CudaContext& context_;
  // Of the wave under way.
  std::span<const AttendItem> items_;  // of the batch
  RecallWave wave_ = {};
};

}  // namespace heavywater::cuda
