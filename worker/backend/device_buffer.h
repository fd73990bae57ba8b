// Memory of a device as its own type. Only a Backend may look inside: on a GPU
// the address means nothing to the host, so the CPU's code does not look either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "cache_service/base/check.h"

namespace heavywater {

// A typed view of device memory. Copyable; does not own.
template <typename T>
class DeviceSpan {
 public:
  DeviceSpan() = default;
  DeviceSpan(T* address, int64_t size) : address_(address), size_(size) {}
  // A view of T is also a view of const T.
  template <typename U>
  requires(!std::is_same_v<T, U> && std::is_convertible_v<U*, T*>)
      DeviceSpan(const DeviceSpan<U>& other)  // NOLINT(google-explicit-constructor)
      : address_(other.device_address()), size_(other.size()) {}

  int64_t size() const { return size_; }
  int64_t size_bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }
  bool empty() const { return size_ == 0; }
  DeviceSpan Sub(int64_t offset, int64_t size) const {
    HW_CHECK(offset >= 0 && size >= 0 && offset + size <= size_);
    return DeviceSpan(address_ + offset, size);
  }

  // For backends and communicators only.
  T* device_address() const { return address_; }

 private:
  T* address_ = nullptr;
  int64_t size_ = 0;
};

// Owns device memory. Move only. 64-byte aligned.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(std::byte* address, int64_t bytes, std::function<void(std::byte*)> release)
      : address_(address), bytes_(bytes), release_(std::move(release)) {}
  ~DeviceBuffer() { Reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    address_ = std::exchange(other.address_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    release_ = std::exchange(other.release_, nullptr);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  int64_t bytes() const { return bytes_; }

  // `count` elements of T from `byte_offset`.
  template <typename T>
  DeviceSpan<T> As(int64_t byte_offset, int64_t count) const {
    HW_CHECK(byte_offset >= 0 && byte_offset % static_cast<int64_t>(alignof(T)) == 0);
    HW_CHECK(byte_offset + count * static_cast<int64_t>(sizeof(T)) <= bytes_);
    return DeviceSpan<T>(reinterpret_cast<T*>(address_ + byte_offset), count);
  }
  template <typename T>
  DeviceSpan<T> As() const {
    return As<T>(0, bytes_ / static_cast<int64_t>(sizeof(T)));
  }

 private:
  void Reset() {
    if (address_ != nullptr && release_) release_(address_);
    address_ = nullptr;
    bytes_ = 0;
  }

  std::byte* address_ = nullptr;
  int64_t bytes_ = 0;
  std::function<void(std::byte*)> release_;
};

// An ordered queue of device work. CPU backends finish each call before it
// returns and ignore the handle; a CUDA stream goes in `handle`.
struct Stream {
  void* handle = nullptr;
};

}  // namespace heavywater
