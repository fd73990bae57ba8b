#include "worker/backend/cuda/staging_ring.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kRingBytes = StagingRing::kSegmentBytes * StagingRing::kSegments;

void AddStream(std::vector<cudaStream_t>& streams, cudaStream_t stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<StagingRing>> StagingRing::Create() {
  std::unique_ptr<StagingRing> ring(new StagingRing);
  ring->segments_.resize(kSegments);
  HW_RETURN_IF_CUDA_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&ring->host_),
                                        kRingBytes + kCaptureBytes, cudaHostAllocPortable));
  HW_RETURN_IF_CUDA_ERROR(
      cudaMalloc(reinterpret_cast<void**>(&ring->device_), kRingBytes + kCaptureBytes));
  return ring;
}

StagingRing::~StagingRing() {
  // The device is done with the memory when these return.
  cudaFree(device_);
  cudaFreeHost(host_);
  for (const Segment& segment : segments_) {
    for (const Use& use : segment.uses) cudaEventDestroy(use.event);
  }
  for (cudaEvent_t event : idle_events_) cudaEventDestroy(event);
}

absl::Status StagingRing::Begin(cudaStream_t stream) {
  HW_CHECK(streams_.empty());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  HW_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &capture));
  capturing_ = capture != cudaStreamCaptureStatusNone;
  streams_.push_back(stream);
  return absl::OkStatus();
}

void StagingRing::AlsoUsedOn(cudaStream_t stream) { AddStream(streams_, stream); }

absl::Status StagingRing::End() {
  absl::Status status;
  for (Segment& segment : segments_) {
    if (!segment.of_operation) continue;
    segment.of_operation = false;
    for (cudaStream_t stream : streams_) AddStream(segment.streams, stream);
    if (segment.left) status.Update(Record(segment));
  }
  streams_.clear();
  return status;
}

absl::StatusOr<StagingRing::Place> StagingRing::Take(int64_t bytes) {
  HW_CHECK(!streams_.empty());
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded > kMaxBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("an operation's list of ", bytes,
                                                     " bytes: at most ", kMaxBytes,
                                                     " go to the device at once"));
  }
  if (capturing_) return TakeForCapture(rounded);
  if (used_ + rounded > kSegmentBytes) HW_RETURN_IF_ERROR(Advance());
  segments_[current_].of_operation = true;
  const int64_t offset = current_ * kSegmentBytes + used_;
  used_ += rounded;
  return Place{.host = host_ + offset, .device = device_ + offset, .bytes = bytes};
}

absl::StatusOr<StagingRing::Place> StagingRing::TakeForCapture(int64_t bytes) {
  if (captured_ + bytes > kCaptureBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("captured graphs hold ", captured_,
                                                     " bytes of parameters and ask for ", bytes,
                                                     " more: at most ", kCaptureBytes));
  }
  const int64_t offset = kRingBytes + captured_;
  captured_ += bytes;
  return Place{.host = host_ + offset, .device = device_ + offset, .bytes = bytes};
}

absl::Status StagingRing::Send(const Place& place) {
  if (place.bytes == 0) return absl::OkStatus();
  return HW_CUDA_STATUS(cudaMemcpyAsync(place.device, place.host, place.bytes,
                                        cudaMemcpyHostToDevice, streams_.front()));
}

absl::Status StagingRing::Advance() {
  Segment& segment = segments_[current_];
  segment.left = true;
  // What the operation under way took is in use until its end.
  if (!segment.of_operation) HW_RETURN_IF_ERROR(Record(segment));
  current_ = (current_ + 1) % kSegments;
  used_ = 0;
  return Await(segments_[current_]);
}

absl::Status StagingRing::Record(Segment& segment) {
  for (cudaStream_t stream : segment.streams) {
    cudaEvent_t event = nullptr;
    if (idle_events_.empty()) {
      HW_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
    segment.uses.push_back({.stream = stream, .event = event});
    HW_RETURN_IF_CUDA_ERROR(cudaEventRecord(event, stream));
  }
  segment.streams.clear();
  return absl::OkStatus();
}

absl::Status StagingRing::Await(Segment& segment) {
  if (segment.of_operation) {
    return absl::ResourceExhaustedError(absl::StrCat("an operation's lists take more than the ",
                                                     kRingBytes, " bytes of the staging ring"));
  }
  for (const Use& use : segment.uses) {
    HW_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(use.event));
    idle_events_.push_back(use.event);
  }
  segment.uses.clear();
  segment.left = false;
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
