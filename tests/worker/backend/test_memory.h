// Host memory that a backend's kernels may reach: whole pages, registered for as long
// as it lives.
#pragma once

#include <cstddef>
#include <span>

#include "worker/backend/backend.h"

namespace heavywater {

class TestMemory {
 public:
  // Filled with `fill`. Outlived by the backend.
  TestMemory(Backend& backend, size_t bytes, std::byte fill = std::byte{0});
  ~TestMemory();
  TestMemory(const TestMemory&) = delete;
  TestMemory& operator=(const TestMemory&) = delete;

  std::byte* data() { return memory_.data(); }
  std::span<std::byte> span() { return memory_; }

 private:
  Backend& backend_;
  std::span<std::byte> memory_;
};

}  // namespace heavywater
