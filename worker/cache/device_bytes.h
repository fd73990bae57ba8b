// A device span as bytes, for copies. Looks at no memory.
#pragma once

#include <type_traits>

#include "worker/backend/device_buffer.h"

namespace heavywater {

template <typename T>
auto DeviceBytes(DeviceSpan<T> span) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return DeviceSpan<Byte>(reinterpret_cast<Byte*>(span.device_address()), span.size_bytes());
}

}  // namespace heavywater
