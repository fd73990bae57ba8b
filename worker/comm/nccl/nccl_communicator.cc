#include "worker/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/comm/nccl/device_stream.h"
#include "worker/comm/nccl/nccl_connect.h"

namespace heavywater {
namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(20);
// How long work that is queued when all ranks leave may take.
constexpr absl::Duration kFinishTimeout = absl::Seconds(2);

cudaStream_t HandleOf(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const NcclOptions& options, RendezvousStore& store) {
  SetSocketInterface(options);
  HW_RETURN_IF_ERROR(UseDevice(options.device));
  HW_ASSIGN_OR_RETURN(std::unique_ptr<GlooMesh> mesh,
                      GlooMesh::Connect({.rank = options.rank,
                                         .size = options.size,
                                         .listen_address = options.listen_address,
                                         .interface = options.interface,
                                         .timeout = options.timeout,
                                         .key_prefix = absl::StrCat(options.key_prefix, "host/")},
                                        store));
  auto host = std::make_unique<GlooCommunicator>(std::move(mesh), options.timeout);
  HW_RETURN_IF_ERROR(host->Connect());
  // From here on a rank that gives up closes its connections, which ends the
  // others' waits.
  HW_ASSIGN_OR_RETURN(const ncclUniqueId id, ShareUniqueId(options, store));
  HW_ASSIGN_OR_RETURN(std::unique_ptr<NcclHandle> nccl,
                      NcclHandle::Create(id, {.rank = options.rank,
                                              .size = options.size,
                                              .timeout = options.timeout,
                                              .keep_waiting = [&] {
                                                return host->collectives().mesh().CheckOpen();
                                              }}));
  HW_RETURN_IF_ERROR(host->Barrier());
  return std::make_unique<NcclCommunicator>(options.device, std::move(host), std::move(nccl));
}

NcclCommunicator::NcclCommunicator(int device, std::unique_ptr<GlooCommunicator> host,
                                   std::unique_ptr<NcclHandle> nccl)
    : device_(device),
      host_(std::move(host)),
      nccl_(std::move(nccl)),
      watch_([this] { Watch(); }) {}

NcclCommunicator::~NcclCommunicator() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    stopped_.SignalAll();
  }
  watch_.join();
  if (host_->Leave().ok()) nccl_->Finish(kFinishTimeout);
}

absl::Status NcclCommunicator::AllReduceSum(DeviceSpan<float> data, Stream& stream) {
  float* const address = data.device_address();
  return Queue(host_->NextCall(CallOp::kAllReduceSum, CallType::kFloat32, data.size()),
               [&](ncclComm_t comm) {
                 return ncclAllReduce(address, address, data.size(), ncclFloat32, ncclSum, comm,
                                      HandleOf(stream));
               });
}

absl::Status NcclCommunicator::AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) {
  int64_t* const address = data.device_address();
  return Queue(host_->NextCall(CallOp::kAllReduceSum, CallType::kInt64, data.size()),
               [&](ncclComm_t comm) {
                 return ncclAllReduce(address, address, data.size(), ncclInt64, ncclSum, comm,
                                      HandleOf(stream));
               });
}

absl::Status NcclCommunicator::AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                                         Stream& stream) {
  HW_CHECK(out.size() == in.size() * size());
  return Queue(host_->NextCall(CallOp::kAllGather, CallType::kFloat32, in.size()),
               [&](ncclComm_t comm) {
                 return ncclAllGather(in.device_address(), out.device_address(), in.size(),
                                      ncclFloat32, comm, HandleOf(stream));
               });
}

absl::Status NcclCommunicator::Queue(const CallHeader& call, const QueueWork& queue) {
  HW_RETURN_IF_ERROR(host_->FirstError());
  HW_RETURN_IF_ERROR(AgreeIfNew(call));
  // A stream without a handle is the current device's.
  HW_RETURN_IF_ERROR(BreakUnlessOk(UseDevice(device_)));
  log_.Record(call);
  SetSettleBy(absl::Now() + host_->timeout());
  if (call.length > 0) {
    const absl::Status queued = nccl_->Queue("NCCL", queue);
    if (!queued.ok()) {
      return Break(absl::Status(
          queued.code(),
          absl::StrCat(DescribeCall(call), " (call ", call.sequence, "): ", queued.message())));
    }
  }
  return log_.full() ? CompareCalls() : absl::OkStatus();
}

absl::Status NcclCommunicator::AgreeIfNew(const CallHeader& call) {
  if (log_.IsKnown(call)) return absl::OkStatus();
  HW_RETURN_IF_ERROR(BreakUnlessOk(host_->Agree(call)));
  log_.AddKnown(call);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Settle(Stream& stream) {
  HW_RETURN_IF_ERROR(host_->FirstError());
  HW_RETURN_IF_ERROR(CompareCalls());
  HW_RETURN_IF_ERROR(BreakUnlessOk(UseDevice(device_)));
  // Ends when a peer dies, too: Watch() aborts, which ends NCCL's work.
  const absl::Status done = SynchronizeStream(stream);
  HW_RETURN_IF_ERROR(host_->FirstError());
  HW_RETURN_IF_ERROR(BreakUnlessOk(nccl_->CheckAsync()));
  HW_RETURN_IF_ERROR(BreakUnlessOk(done));
  SetSettleBy(absl::InfiniteFuture());
  return absl::OkStatus();
}

absl::Status NcclCommunicator::CompareCalls() {
  if (log_.empty()) return absl::OkStatus();
  const CallHeader call = host_->NextCall(CallOp::kSettle, CallType::kNone, log_.Digest());
  HW_RETURN_IF_ERROR(BreakUnlessOk(host_->Run(call, [&] {
    const absl::Status same = host_->collectives().Meet(call, host_->timeout());
    const auto settles = [](const CallHeader& other) {
      return other.magic == CallHeader::kMagic && other.op == CallOp::kSettle;
    };
    const bool all_settle = std::ranges::all_of(host_->collectives().calls(), settles);
    return absl::IsFailedPrecondition(same) && all_settle ? NameDifference() : same;
  })));
  log_.Clear();
  return absl::OkStatus();
}

absl::Status NcclCommunicator::NameDifference() {
  std::vector<std::vector<CallHeader>> logs;
  for (int rank = 0; rank < size(); ++rank) {
    HW_ASSIGN_OR_RETURN(std::vector<CallHeader> log, LogOf(rank));
    logs.push_back(std::move(log));
  }
  HW_RETURN_IF_ERROR(CompareLogs(logs));
  return absl::InternalError("ranks' calls have different digests and are the same");
}

absl::StatusOr<std::vector<CallHeader>> NcclCommunicator::LogOf(int rank) {
  CallHeader call;  // outside the numbering, which may differ by now
  call.op = CallOp::kBroadcast;
  call.type = CallType::kByte;
  call.rank = host_->rank();
  call.root = rank;
  std::vector<std::byte> bytes;
  if (rank == host_->rank()) {
    const auto own = std::as_bytes(log_.calls());
    bytes.assign(own.begin(), own.end());
    call.length = static_cast<int64_t>(bytes.size());
  }
  HW_RETURN_IF_ERROR(host_->collectives().Broadcast(call, bytes, host_->timeout()));
  std::vector<CallHeader> log(bytes.size() / sizeof(CallHeader));
  if (!log.empty()) std::memcpy(log.data(), bytes.data(), log.size() * sizeof(CallHeader));
  return log;
}

absl::Status NcclCommunicator::Broadcast(std::vector<std::byte>& data, int root,
                                         absl::Duration timeout) {
  return BreakUnlessOk(host_->Broadcast(data, root, timeout));
}

absl::Status NcclCommunicator::Barrier() { return BreakUnlessOk(host_->Barrier()); }

absl::Status NcclCommunicator::Break(absl::Status status) {
  status = host_->Break(std::move(status));
  nccl_->Abort();
  return status;
}

absl::Status NcclCommunicator::BreakUnlessOk(absl::Status status) {
  return status.ok() ? status : Break(std::move(status));
}

void NcclCommunicator::Watch() {
  UseDevice(device_).IgnoreError();  // for an abort; it was possible before
  for (;;) {
    absl::Time settle_by;
    {
      MutexLock lock(&mutex_);
      if (!stop_) stopped_.WaitWithTimeout(&mutex_, kWatchInterval);
      if (stop_) return;
      settle_by = settle_by_;
    }
    const absl::Status status = CheckPeers(settle_by);
    if (status.ok()) continue;
    Break(status).IgnoreError();
    return;
  }
}

absl::Status NcclCommunicator::CheckPeers(absl::Time settle_by) {
  HW_RETURN_IF_ERROR(nccl_->CheckAsync());
  if (settle_by == absl::InfiniteFuture()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(host_->collectives().mesh().CheckOpen());
  if (absl::Now() < settle_by) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("collectives on the device did not end within ",
                                                  absl::FormatDuration(host_->timeout()),
                                                  " after the last one was queued"));
}

void NcclCommunicator::SetSettleBy(absl::Time settle_by) {
  MutexLock lock(&mutex_);
  settle_by_ = settle_by;
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options,
                                                                     RendezvousStore& store) {
  return NcclCommunicator::Create(options, store);
}

}  // namespace heavywater
