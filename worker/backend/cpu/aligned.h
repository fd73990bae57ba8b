// Scratch memory that grows and is reused between calls.
#pragma once

#include <algorithm>
#include <cstddef>

#include "hwy/aligned_allocator.h"

namespace heavywater {

// At least `size` elements aligned for vectors; contents are undefined after
// Grow().
template <typename T>
class AlignedScratch {
 public:
  T* Grow(size_t size) {
    if (size > size_) {
      size_ = std::max(size, size_ + size_ / 2);
      memory_ = hwy::AllocateAligned<T>(size_);
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  hwy::AlignedFreeUniquePtr<T[]> memory_;
  size_t size_ = 0;
};

}  // namespace heavywater
