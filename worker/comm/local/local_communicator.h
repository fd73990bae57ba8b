// One rank of a local group: ranks are threads of one process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/comm/local/local_group.h"

namespace heavywater {

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(int rank, std::shared_ptr<LocalGroup> group)
      : rank_(rank), group_(std::move(group)) {}
  ~LocalCommunicator() override { group_->Leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  std::string Name() const override { return "local"; }

  absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) override;
  absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) override;
  absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                         Stream& stream) override;
  absl::Status Broadcast(std::vector<std::byte>& data, int root, absl::Duration timeout) override;
  absl::Status Barrier() override;
  void Abort(absl::Status reason) override { group_->Abort(rank_, reason); }

 private:
  CallHeader NextCall(CallOp op, CallType type, int64_t length);
  template <typename T>
  absl::Status Reduce(DeviceSpan<T> data, CallType type);

  const int rank_;
  const std::shared_ptr<LocalGroup> group_;
  uint64_t sequence_ = 0;
};

}  // namespace heavywater
