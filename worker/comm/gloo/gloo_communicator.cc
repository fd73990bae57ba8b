#include "worker/comm/gloo/gloo_communicator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// How long a rank that leaves waits for the others to leave as well.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(2);

template <typename T>
std::span<T> HostSpan(DeviceSpan<T> data) {
  return {data.device_address(), static_cast<size_t>(data.size())};
}

}  // namespace

GlooCommunicator::GlooCommunicator(std::unique_ptr<GlooMesh> mesh, absl::Duration timeout)
    : timeout_(timeout), collectives_(std::move(mesh), timeout) {}

GlooCommunicator::~GlooCommunicator() {
  // Whatever goes wrong here, there is nobody left to tell.
  if (!has_left_) Leave().IgnoreError();
  collectives_.mesh().Shutdown();
}

absl::Status GlooCommunicator::Leave() {
  has_left_ = true;
  const CallHeader call = NextCall(CallOp::kLeave, CallType::kNone, 0);
  absl::Status status =
      Run(call, [&] { return collectives_.Meet(call, std::min(timeout_, kLeaveTimeout)); });
  // Whoever has heard from all may close before the others have.
  const auto leaves = [](const CallHeader& other) { return other.op == CallOp::kLeave; };
  if (std::ranges::all_of(collectives_.calls(), leaves)) return absl::OkStatus();
  return status;
}

absl::Status GlooCommunicator::Connect() {
  return Agree(NextCall(CallOp::kConnect, CallType::kNone, 0));
}

absl::Status GlooCommunicator::Agree(const CallHeader& call) {
  return Run(call, [&] { return collectives_.Meet(call, timeout_); });
}

CallHeader GlooCommunicator::NextCall(CallOp op, CallType type, int64_t length) {
  CallHeader call;
  call.op = op;
  call.type = type;
  call.rank = rank();
  call.sequence = ++sequence_;
  call.length = length;
  return call;
}

absl::Status GlooCommunicator::Run(const CallHeader& call,
                                   const std::function<absl::Status()>& collective) {
  HW_RETURN_IF_ERROR(FirstError());
  absl::Status status = collective();
  if (status.ok()) return status;
  return Break(absl::Status(status.code(), absl::StrCat(DescribeCall(call), " (call ",
                                                        call.sequence, "): ", status.message())));
}

absl::Status GlooCommunicator::FirstError() const {
  MutexLock lock(&mutex_);
  return broken_;
}

absl::Status GlooCommunicator::Break(absl::Status status) {
  {
    MutexLock lock(&mutex_);
    if (!broken_.ok()) return broken_;
    broken_ = status;
  }
  // Ranks that disagree all know it from the same exchange. Any other error the
  // peers learn from the closed connection.
  if (!absl::IsFailedPrecondition(status)) collectives_.mesh().Shutdown();
  return status;
}

void GlooCommunicator::Abort(absl::Status reason) { Break(std::move(reason)).IgnoreError(); }

absl::Status GlooCommunicator::AllReduceSum(DeviceSpan<float> data, Stream&) {
  const CallHeader call = NextCall(CallOp::kAllReduceSum, CallType::kFloat32, data.size());
  return Run(call, [&] { return collectives_.AllReduceSum(call, HostSpan(data)); });
}

absl::Status GlooCommunicator::AllReduceSum(DeviceSpan<int64_t> data, Stream&) {
  const CallHeader call = NextCall(CallOp::kAllReduceSum, CallType::kInt64, data.size());
  return Run(call, [&] { return collectives_.AllReduceSum(call, HostSpan(data)); });
}

absl::Status GlooCommunicator::AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                                         Stream&) {
  const CallHeader call = NextCall(CallOp::kAllGather, CallType::kFloat32, in.size());
  return Run(call, [&] { return collectives_.AllGather(call, HostSpan(in), HostSpan(out)); });
}

absl::Status GlooCommunicator::Broadcast(std::vector<std::byte>& data, int root,
                                         absl::Duration timeout) {
  HW_CHECK(root >= 0 && root < size());
  CallHeader call = NextCall(CallOp::kBroadcast, CallType::kByte,
                             rank() == root ? static_cast<int64_t>(data.size()) : 0);
  call.root = root;
  return Run(call, [&] { return collectives_.Broadcast(call, data, timeout); });
}

absl::Status GlooCommunicator::Barrier() {
  return Agree(NextCall(CallOp::kBarrier, CallType::kNone, 0));
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options,
                                                                     RendezvousStore& store) {
  HW_ASSIGN_OR_RETURN(std::unique_ptr<GlooMesh> mesh, GlooMesh::Connect(options, store));
  auto communicator = std::make_unique<GlooCommunicator>(std::move(mesh), options.timeout);
  HW_RETURN_IF_ERROR(communicator->Connect());
  return communicator;
}

}  // namespace heavywater
