#include "worker/comm/nccl/nccl_handle.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "worker/comm/nccl/nccl_check.h"

namespace heavywater {
namespace {

// Between two looks at what NCCL does in the background. Short at first: taking
// work is quick unless connections have to be opened.
constexpr absl::Duration kFirstPoll = absl::Microseconds(20);
constexpr absl::Duration kLastPoll = absl::Milliseconds(5);

absl::Status KeepWaiting() { return absl::OkStatus(); }

absl::Status Aborted() { return absl::UnavailableError("the NCCL communicator was aborted"); }

}  // namespace

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Create(const ncclUniqueId& id,
                                                               const Options& options) {
  std::unique_ptr<NcclHandle> handle(new NcclHandle(options.timeout));
  HW_RETURN_IF_ERROR(handle->Init(id, options));
  return handle;
}

NcclHandle::~NcclHandle() { Abort(); }

absl::Status NcclHandle::Init(const ncclUniqueId& id, const Options& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclResult_t result;
  {
    MutexLock lock(&mutex_);
    result = ncclCommInitRankConfig(&comm_, options.size, id, options.rank, &config);
  }
  return Await(result, "ncclCommInitRankConfig", absl::Now() + timeout_, options.keep_waiting);
}

absl::Status NcclHandle::Await(ncclResult_t result, const char* expression, absl::Time deadline,
                               const std::function<absl::Status()>& keep_waiting) {
  absl::Duration poll = kFirstPoll;
  while (result == ncclInProgress) {
    HW_RETURN_IF_ERROR(keep_waiting());
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(expression, " did not end within ", absl::FormatDuration(timeout_)));
    }
    absl::SleepFor(poll);
    poll = std::min(2 * poll, kLastPoll);
    MutexLock lock(&mutex_);
    if (comm_ == nullptr) return Aborted();
    HW_RETURN_IF_ERROR(HW_NCCL_STATUS(ncclCommGetAsyncError(comm_, &result)));
  }
  return NcclStatus(result, expression);
}

absl::Status NcclHandle::Queue(const char* expression,
                               const std::function<ncclResult_t(ncclComm_t)>& queue) {
  ncclResult_t result;
  {
    MutexLock lock(&mutex_);
    if (comm_ == nullptr) return Aborted();
    result = queue(comm_);
  }
  return Await(result, expression, absl::Now() + timeout_, KeepWaiting);
}

absl::Status NcclHandle::CheckAsync() {
  MutexLock lock(&mutex_);
  if (comm_ == nullptr) return absl::OkStatus();
  ncclResult_t result = ncclSuccess;
  HW_RETURN_IF_ERROR(HW_NCCL_STATUS(ncclCommGetAsyncError(comm_, &result)));
  return result == ncclInProgress ? absl::OkStatus()
                                  : NcclStatus(result, "a collective on the device");
}

void NcclHandle::Abort() {
  MutexLock lock(&mutex_);
  // Nothing can be done about an abort that fails, nor is the handle used again.
  if (comm_ != nullptr) static_cast<void>(ncclCommAbort(comm_));
  comm_ = nullptr;
}

void NcclHandle::Finish(absl::Duration timeout) {
  ncclResult_t result;
  {
    MutexLock lock(&mutex_);
    if (comm_ == nullptr) return;
    result = ncclCommFinalize(comm_);
  }
  if (!Await(result, "ncclCommFinalize", absl::Now() + timeout, KeepWaiting).ok()) return Abort();
  MutexLock lock(&mutex_);
  if (comm_ != nullptr) static_cast<void>(ncclCommDestroy(comm_));
  comm_ = nullptr;
}

}  // namespace heavywater
