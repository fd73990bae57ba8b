// A GPU's limits and its clock, measured in the same run as what is compared with
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

class BenchDevice {
 public:
  // FAILED_PRECONDITION without a GPU.
  static absl::StatusOr<std::unique_ptr<BenchDevice>> Create();

  Backend& backend() { return *backend_; }
  // Work that is captured: CUDA's default stream cannot be.
  Stream& stream() { return stream_; }
  const std::string& name() const { return name_; }
  int64_t cache_bytes() const { return cache_bytes_; }  // L2

  // Bytes a second of a kernel that only reads, over much more than the cache, the
  // best of some rounds; and of a copy, read and written bytes counted.
  absl::StatusOr<double> MeasureRead();
  absl::StatusOr<double> MeasureCopy();

  // Median seconds of what `enqueue` puts on the stream, replayed as one CUDA graph,
  // so that launches cost what they cost in a captured step. Each round must itself
  // go through more memory than the cache holds.
  using Enqueue = std::function<absl::Status(Stream&)>;
  absl::StatusOr<double> TimeGraph(int rounds, const Enqueue& enqueue);

 private:
  BenchDevice() = default;
  absl::StatusOr<double> TimeRounds(int rounds, const Enqueue& enqueue);

  std::unique_ptr<Backend> backend_;
  Stream stream_;
  std::string name_;
  int64_t cache_bytes_ = 0;
};

}  // namespace heavywater
