// Device memory as a vector of the host's.
#pragma once

#include <span>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_service/base/status.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {

// A copy of `from`, once the stream's work before it is done.
template <typename T>
absl::StatusOr<std::vector<std::remove_const_t<T>>> ReadDevice(DeviceSpan<T> from, Backend& backend,
                                                               Stream& stream) {
  std::vector<std::remove_const_t<T>> to(from.size());
  HW_RETURN_IF_ERROR(
      backend.CopyToHost(std::as_writable_bytes(std::span(to)), DeviceBytes(from), stream));
  HW_RETURN_IF_ERROR(backend.Synchronize(stream));
  return to;
}

}  // namespace heavywater
