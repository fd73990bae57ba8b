#include "tests/bench/cuda/device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "cache_service/base/status.h"
#include "tests/bench/cuda/read_kernel.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater {
namespace {

constexpr int64_t kReadBytes = int64_t{4} << 30;
constexpr int kRounds = 11;

cudaStream_t HandleOf(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchDevice>> BenchDevice::Create() {
  std::unique_ptr<BenchDevice> device(new BenchDevice);
  HW_ASSIGN_OR_RETURN(device->backend_, CreateCudaBackend({}));
  HW_ASSIGN_OR_RETURN(device->stream_, device->backend_->NewStream());
  cudaDeviceProp properties = {};
  HW_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, 0));
  device->name_ = properties.name;
  device->cache_bytes_ = properties.l2CacheSize;
  return device;
}

// The first round also loads modules.
absl::StatusOr<double> BenchDevice::TimeRounds(int rounds, const Enqueue& enqueue) {
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreate(&start));
  const auto destroy_start = absl::MakeCleanup([&] { cudaEventDestroy(start); });
  HW_RETURN_IF_CUDA_ERROR(cudaEventCreate(&end));
  const auto destroy_end = absl::MakeCleanup([&] { cudaEventDestroy(end); });
  HW_RETURN_IF_ERROR(enqueue(stream_));
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    HW_RETURN_IF_CUDA_ERROR(cudaEventRecord(start, HandleOf(stream_)));
    HW_RETURN_IF_ERROR(enqueue(stream_));
    HW_RETURN_IF_CUDA_ERROR(cudaEventRecord(end, HandleOf(stream_)));
    HW_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(end));
    float milliseconds = 0;
    HW_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, start, end));
    seconds.push_back(milliseconds * 1e-3);
  }
  return Median(std::move(seconds));
}

absl::StatusOr<double> BenchDevice::TimeGraph(int rounds, const Enqueue& enqueue) {
  // Once without: what is set up at the first call is not part of the graph.
  HW_RETURN_IF_ERROR(enqueue(stream_));
  HW_RETURN_IF_ERROR(backend_->Synchronize(stream_));
  HW_RETURN_IF_CUDA_ERROR(
      cudaStreamBeginCapture(HandleOf(stream_), cudaStreamCaptureModeThreadLocal));
  const absl::Status enqueued = enqueue(stream_);
  cudaGraph_t graph = nullptr;
  const absl::Status captured = HW_CUDA_STATUS(cudaStreamEndCapture(HandleOf(stream_), &graph));
  HW_RETURN_IF_ERROR(enqueued);
  HW_RETURN_IF_ERROR(captured);
  const auto destroy_graph = absl::MakeCleanup([&] { cudaGraphDestroy(graph); });
  cudaGraphExec_t exec = nullptr;
  HW_RETURN_IF_CUDA_ERROR(cudaGraphInstantiate(&exec, graph, 0));
  const auto destroy_exec = absl::MakeCleanup([&] { cudaGraphExecDestroy(exec); });
  return TimeRounds(rounds, [exec](Stream& stream) {
    return HW_CUDA_STATUS(cudaGraphLaunch(exec, HandleOf(stream)));
  });
}

absl::StatusOr<double> BenchDevice::MeasureRead() {
  HW_ASSIGN_OR_RETURN(const DeviceBuffer buffer, backend_->Allocate(kReadBytes));
  HW_ASSIGN_OR_RETURN(const DeviceBuffer sink, backend_->Allocate(sizeof(uint32_t)));
  HW_ASSIGN_OR_RETURN(
      const double seconds, TimeRounds(kRounds, [&](Stream& stream) {
        return HW_CUDA_STATUS(LaunchRead(buffer.As<std::byte>().device_address(), kReadBytes,
                                         sink.As<uint32_t>().device_address(), HandleOf(stream)));
      }));
  return static_cast<double>(kReadBytes) / seconds;
}

absl::StatusOr<double> BenchDevice::MeasureCopy() {
  HW_ASSIGN_OR_RETURN(const DeviceBuffer buffer, backend_->Allocate(kReadBytes));
  const int64_t half = kReadBytes / 2;
  HW_ASSIGN_OR_RETURN(const double seconds, TimeRounds(kRounds, [&](Stream& stream) {
                        return backend_->CopyOnDevice(buffer.As<std::byte>(half, half),
                                                      buffer.As<std::byte>(0, half), stream);
                      }));
  return static_cast<double>(kReadBytes) / seconds;
}

}  // namespace heavywater
