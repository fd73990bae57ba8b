// A backend's scratch memory, cut into parts. The same code counts the bytes and
// lays the parts out, so the two cannot differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heavywater {

class ScratchCutter {
 public:
  // `memory` null: only counts; parts are null then.
  explicit ScratchCutter(std::byte* memory) : memory_(memory) {}

  // The next `count` elements, whole cache lines; contents are undefined.
  template <typename T>
  T* Take(int64_t count) {
    std::byte* const part = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return reinterpret_cast<T*>(part);
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kLine = 64;

  std::byte* const memory_;
  int64_t bytes_ = 0;
};

}  // namespace heavywater
