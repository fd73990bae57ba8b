// A small seeded generator: for orders and poison.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace heavywater::cuda_shim {

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t value = state_ += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
  }
  template <typename T>
  void Shuffle(T* values, int count) {
    for (int i = count - 1; i > 0; --i) std::swap(values[i], values[Next() % (i + 1)]);
  }
  // All bits set, or random ones.
  void Fill(bool random, std::byte* memory, size_t bytes) {
    if (!random) {
      std::memset(memory, 0xff, bytes);
      return;
    }
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
      const uint64_t value = Next();
      std::memcpy(memory + i, &value, 8);
    }
    for (; i < bytes; ++i) memory[i] = static_cast<std::byte>(Next());
  }

 private:
  uint64_t state_;
};

}  // namespace heavywater::cuda_shim
