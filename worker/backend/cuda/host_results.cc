#include "worker/backend/cuda/host_results.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

HostResults::~HostResults() {
  for (const auto& block : blocks_) cudaFreeHost(block->memory);
}

absl::StatusOr<std::byte*> HostResults::Expect(cudaStream_t stream, int64_t bytes,
                                               Deliver deliver) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  HW_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return absl::FailedPreconditionError(
        "the stream is being captured: a graph cannot deliver results to the host's memory");
  }
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  HW_ASSIGN_OR_RETURN(Block* const block, FindRoom(rounded));
  std::byte* const memory = block->memory + block->used;
  block->used += rounded;
  ++block->pending;
  results_.push_back({.stream = stream,
                      .block = block,
                      .bytes = {memory, static_cast<size_t>(bytes)},
                      .deliver = std::move(deliver)});
  return memory;
}

absl::Status HostResults::Copy(cudaStream_t stream, const void* device, int64_t bytes,
                               Deliver deliver) {
  HW_ASSIGN_OR_RETURN(std::byte* const memory, Expect(stream, bytes, std::move(deliver)));
  return HW_CUDA_STATUS(cudaMemcpyAsync(memory, device, bytes, cudaMemcpyDeviceToHost, stream));
}

absl::StatusOr<HostResults::Block*> HostResults::FindRoom(int64_t bytes) {
  if (bytes > kBlockBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a result of ", bytes, " bytes for the host: at most ", kBlockBytes));
  }
  if (current_ != nullptr && current_->used + bytes <= kBlockBytes) return current_;
  const auto is_free = [](const auto& block) { return block->pending == 0; };
  auto found = std::find_if(blocks_.begin(), blocks_.end(), is_free);
  if (found == blocks_.end() && blocks_.size() == kMaxBlocks) {
    early_.Update(Drain());
    found = blocks_.begin();
  }
  if (found == blocks_.end()) {
    auto block = std::make_unique<Block>();
    HW_RETURN_IF_CUDA_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&block->memory), kBlockBytes,
                                          cudaHostAllocPortable | cudaHostAllocMapped));
    blocks_.push_back(std::move(block));
    found = std::prev(blocks_.end());
  }
  current_ = found->get();
  current_->used = 0;
  return current_;
}

absl::Status HostResults::Drain() {
  absl::Status status;
  while (!results_.empty()) {
    const cudaStream_t stream = results_.front().stream;
    status.Update(HW_CUDA_STATUS(cudaStreamSynchronize(stream)));
    status.Update(HandOver(stream));
  }
  return status;
}

absl::Status HostResults::HandOver(cudaStream_t stream) {
  absl::Status status = std::exchange(early_, absl::OkStatus());
  const auto is_other = [&](const Result& result) { return result.stream != stream; };
  const auto first = std::stable_partition(results_.begin(), results_.end(), is_other);
  for (auto result = first; result != results_.end(); ++result) {
    status.Update(result->deliver(result->bytes));
    --result->block->pending;
  }
  results_.erase(first, results_.end());
  return status;
}

}  // namespace heavywater::cuda
