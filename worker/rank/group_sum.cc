#include "worker/rank/group_sum.h"

#include <span>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"

namespace heavywater {

absl::Status SumInPlace(DeviceSpan<int64_t> data, Communicator& communicator, Stream& stream) {
  const StepPhaseScope phase(StepPhase::kReduce);
  HW_RETURN_IF_ERROR(communicator.AllReduceSum(data, stream));
  return communicator.Settle(stream);
}

absl::StatusOr<std::vector<int64_t>> SumOverRanks(std::vector<int64_t> numbers, Backend& backend,
                                                  Communicator& communicator, Stream& stream) {
  if (numbers.empty()) return numbers;
  const auto count = static_cast<int64_t>(numbers.size());
  HW_ASSIGN_OR_RETURN(const DeviceBuffer buffer,
                      backend.Allocate(count * static_cast<int64_t>(sizeof(int64_t))));
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(numbers));
  HW_RETURN_IF_ERROR(backend.CopyToDevice(buffer.As<std::byte>(0, bytes.size()), bytes, stream));
  HW_RETURN_IF_ERROR(SumInPlace(buffer.As<int64_t>(0, count), communicator, stream));
  HW_RETURN_IF_ERROR(backend.CopyToHost(bytes, buffer.As<std::byte>(0, bytes.size()), stream));
  HW_RETURN_IF_ERROR(backend.Synchronize(stream));
  return numbers;
}

absl::Status AgreeOnStatus(const absl::Status& status, Backend& backend, Communicator& communicator,
                           Stream& stream, absl::Status& agreed) {
  std::vector<int64_t> codes(static_cast<size_t>(communicator.size()), 0);
  codes[static_cast<size_t>(communicator.rank())] = static_cast<int64_t>(status.code());
  HW_ASSIGN_OR_RETURN(codes, SumOverRanks(std::move(codes), backend, communicator, stream));
  agreed = absl::OkStatus();
  for (size_t rank = 0; rank < codes.size(); ++rank) {
    if (codes[rank] == 0) continue;
    const bool own = static_cast<int>(rank) == communicator.rank();
    agreed = own ? status
                 : absl::Status(static_cast<absl::StatusCode>(codes[rank]),
                                absl::StrCat("rank ", rank, " failed; its log says why"));
    break;
  }
  return absl::OkStatus();
}

}  // namespace heavywater
