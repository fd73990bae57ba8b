// One rank of a group of GPUs. Device data goes through NCCL on the caller's
// stream; everything that the host says, and the agreement on what is called, goes
// through a Gloo group beside it. Why, and when calls are compared:
// docs/decisions/2026-11-29-nccl.md.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/comm/gloo/gloo_communicator.h"
#include "worker/comm/nccl/call_log.h"
#include "worker/comm/nccl/nccl_handle.h"
#include "worker/comm/nccl/nccl_options.h"

namespace heavywater {

class NcclCommunicator final : public Communicator {
 public:
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(const NcclOptions& options,
                                                                  RendezvousStore& store);
  NcclCommunicator(int device, std::unique_ptr<GlooCommunicator> host,
                   std::unique_ptr<NcclHandle> nccl);
  // Tells the others that this rank leaves, as GlooCommunicator does.
  ~NcclCommunicator() override;

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::string Name() const override { return "nccl"; }

  // A call of a new length or type waits for all ranks' hosts; the others do not
  // wait for anything.
  absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) override;
  absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) override;
  absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                         Stream& stream) override;
  absl::Status Settle(Stream& stream) override;
  absl::Status Broadcast(std::vector<std::byte>& data, int root, absl::Duration timeout) override;
  absl::Status Barrier() override;
  void Abort(absl::Status reason) override { Break(std::move(reason)).IgnoreError(); }

 private:
  using QueueWork = std::function<ncclResult_t(ncclComm_t)>;

  // Agrees on a call where ranks have not agreed on its like before, then queues it.
  absl::Status Queue(const CallHeader& call, const QueueWork& queue);
  absl::Status AgreeIfNew(const CallHeader& call);
  // Compares the calls since the last comparison with all ranks'.
  absl::Status CompareCalls();
  // After the logs' digests differed: the error that names the calls.
  absl::Status NameDifference();
  absl::StatusOr<std::vector<CallHeader>> LogOf(int rank);

  // Keeps the first error, and ends what runs on the device.
  absl::Status Break(absl::Status status);
  // The same for a status that may be OK.
  absl::Status BreakUnlessOk(absl::Status status);

  // A thread's: nothing of NCCL's or CUDA's ends a wait for a peer that has died.
  void Watch();
  absl::Status CheckPeers(absl::Time settle_by);
  void SetSettleBy(absl::Time settle_by);

  const int device_;
  const std::unique_ptr<GlooCommunicator> host_;
  const std::unique_ptr<NcclHandle> nccl_;
  CallLog log_;

  Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  // When calls that are queued must have ended; no time when there are none.
  absl::Time settle_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::thread watch_;
};

}  // namespace heavywater
