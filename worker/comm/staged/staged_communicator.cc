#include "worker/comm/staged/staged_communicator.h"

#include <span>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

template <typename T>
DeviceSpan<std::byte> BytesOf(DeviceSpan<T> data) {
  return {reinterpret_cast<std::byte*>(data.device_address()), data.size_bytes()};
}

template <typename T>
DeviceSpan<const std::byte> BytesOf(DeviceSpan<const T> data) {
  return {reinterpret_cast<const std::byte*>(data.device_address()), data.size_bytes()};
}

// Host memory as what a host communicator takes for its device's.
template <typename T>
DeviceSpan<T> AsHostDevice(std::vector<T>& data) {
  return {data.data(), static_cast<int64_t>(data.size())};
}

template <typename T>
absl::StatusOr<std::vector<T>> ToHost(Backend& backend, DeviceSpan<const T> from, Stream& stream) {
  std::vector<T> to(from.size());
  HW_RETURN_IF_ERROR(
      backend.CopyToHost(std::as_writable_bytes(std::span(to)), BytesOf(from), stream));
  HW_RETURN_IF_ERROR(backend.Synchronize(stream));
  return to;
}

}  // namespace

absl::Status StagedCommunicator::AbortUnlessOk(absl::Status status) {
  if (!status.ok()) host_->Abort(status);
  return status;
}

template <typename T>
absl::Status StagedCommunicator::Reduce(DeviceSpan<T> data, Stream& stream) {
  if (size() == 1) return host_->AllReduceSum(DeviceSpan<T>(), stream);  // the data is the sum
  auto staged = ToHost(backend_, DeviceSpan<const T>(data), stream);
  HW_RETURN_IF_ERROR(AbortUnlessOk(staged.status()));
  HW_RETURN_IF_ERROR(host_->AllReduceSum(AsHostDevice(*staged), stream));
  return AbortUnlessOk(
      backend_.CopyToDevice(BytesOf(data), std::as_bytes(std::span(*staged)), stream));
}

absl::Status StagedCommunicator::AllReduceSum(DeviceSpan<float> data, Stream& stream) {
  return Reduce(data, stream);
}

absl::Status StagedCommunicator::AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) {
  return Reduce(data, stream);
}

absl::Status StagedCommunicator::AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                                           Stream& stream) {
  HW_CHECK(out.size() == in.size() * size());
  if (size() == 1) {
    HW_RETURN_IF_ERROR(host_->AllGather({}, {}, stream));  // an error of an earlier call
    return AbortUnlessOk(backend_.CopyOnDevice(BytesOf(out), BytesOf(in), stream));
  }
  auto staged = ToHost(backend_, in, stream);
  HW_RETURN_IF_ERROR(AbortUnlessOk(staged.status()));
  std::vector<float> all(out.size());
  HW_RETURN_IF_ERROR(host_->AllGather(DeviceSpan<const float>(staged->data(), in.size()),
                                      AsHostDevice(all), stream));
  return AbortUnlessOk(backend_.CopyToDevice(BytesOf(out), std::as_bytes(std::span(all)), stream));
}

}  // namespace heavywater
