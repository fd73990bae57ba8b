#include "tests/worker/backend/test_memory.h"

#include <algorithm>
#include <cstdlib>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr size_t kHostPage = 4096;

}  // namespace

TestMemory::TestMemory(Backend& backend, size_t bytes, std::byte fill) : backend_(backend) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kHostPage - 1) / kHostPage * kHostPage;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kHostPage, rounded));
  HW_CHECK(memory != nullptr);
  std::fill_n(memory, rounded, fill);
  memory_ = {memory, rounded};
  HW_CHECK(backend_.RegisterHostMemory(memory_).ok());
}

TestMemory::~TestMemory() {
  Stream stream;  // whose work may still use the memory
  HW_CHECK(backend_.Synchronize(stream).ok());
  HW_CHECK(backend_.UnregisterHostMemory(memory_).ok());
  std::free(memory_.data());
}

}  // namespace heavywater
