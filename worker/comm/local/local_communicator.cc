#include "worker/comm/local/local_communicator.h"

#include <algorithm>
#include <cstring>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/comm/sum.h"

namespace heavywater {
namespace {

template <typename T>
std::span<const T> As(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

template <typename T>
std::span<const std::byte> BytesOf(DeviceSpan<T> data) {
  return {reinterpret_cast<const std::byte*>(data.device_address()),
          static_cast<size_t>(data.size_bytes())};
}

}  // namespace

CallHeader LocalCommunicator::NextCall(CallOp op, CallType type, int64_t length) {
  CallHeader call;
  call.op = op;
  call.type = type;
  call.rank = rank_;
  call.sequence = ++sequence_;
  call.length = length;
  return call;
}

// Each rank sums its own part of the elements over all ranks into the shared
// scratch, and copies the whole result once all parts are there.
template <typename T>
absl::Status LocalCommunicator::Reduce(DeviceSpan<T> data, CallType type) {
  HW_RETURN_IF_ERROR(group_->Begin(NextCall(CallOp::kAllReduceSum, type, data.size()),
                                   BytesOf(data), group_->timeout()));
  const int64_t begin = data.size() * rank_ / size();
  const int64_t count = data.size() * (rank_ + 1) / size() - begin;
  T* const result = reinterpret_cast<T*>(group_->scratch().data());
  const std::span<T> part(result + begin, count);
  std::ranges::copy(As<T>(group_->data(0)).subspan(begin, count), part.begin());
  for (int rank = 1; rank < size(); ++rank) {
    Add(part, As<T>(group_->data(rank)).subspan(begin, count), part);
  }
  HW_RETURN_IF_ERROR(group_->Finish(rank_));
  std::copy_n(result, data.size(), data.device_address());
  return absl::OkStatus();
}

absl::Status LocalCommunicator::AllReduceSum(DeviceSpan<float> data, Stream&) {
  return Reduce(data, CallType::kFloat32);
}

absl::Status LocalCommunicator::AllReduceSum(DeviceSpan<int64_t> data, Stream&) {
  return Reduce(data, CallType::kInt64);
}

absl::Status LocalCommunicator::AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                                          Stream&) {
  HW_CHECK(out.size() == in.size() * size());
  HW_RETURN_IF_ERROR(group_->Begin(NextCall(CallOp::kAllGather, CallType::kFloat32, in.size()),
                                   BytesOf(in), group_->timeout()));
  std::vector<float> all(out.size());
  for (int rank = 0; rank < size(); ++rank) {
    std::ranges::copy(As<float>(group_->data(rank)), all.begin() + rank * in.size());
  }
  HW_RETURN_IF_ERROR(group_->Finish(rank_));
  std::ranges::copy(all, out.device_address());
  return absl::OkStatus();
}

absl::Status LocalCommunicator::Broadcast(std::vector<std::byte>& data, int root,
                                          absl::Duration timeout) {
  HW_CHECK(root >= 0 && root < size());
  CallHeader call = NextCall(CallOp::kBroadcast, CallType::kByte,
                             rank_ == root ? static_cast<int64_t>(data.size()) : 0);
  call.root = root;
  HW_RETURN_IF_ERROR(group_->Begin(call, data, timeout));
  std::vector<std::byte> received;
  if (rank_ != root) received.assign(group_->data(root).begin(), group_->data(root).end());
  HW_RETURN_IF_ERROR(group_->Finish(rank_));
  if (rank_ != root) data = std::move(received);
  return absl::OkStatus();
}

absl::Status LocalCommunicator::Barrier() {
  HW_RETURN_IF_ERROR(
      group_->Begin(NextCall(CallOp::kBarrier, CallType::kNone, 0), {}, group_->timeout()));
  return group_->Finish(rank_);
}

std::vector<std::unique_ptr<Communicator>> CreateLocalGroup(int size, absl::Duration timeout) {
  auto group = std::make_shared<LocalGroup>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<LocalCommunicator>(rank, group));
  }
  return ranks;
}

}  // namespace heavywater
