// Compiled with -O3: at -O2 these loops stay scalar, which is most of a large
// all-reduce's time.
#include "worker/comm/sum.h"

#include "cache_service/base/check.h"

namespace heavywater {

void Add(std::span<const float> a, std::span<const float> b, std::span<float> total) {
  HW_CHECK(a.size() == total.size() && b.size() == total.size());
  for (size_t i = 0; i < total.size(); ++i) total[i] = a[i] + b[i];
}

void Add(std::span<const int64_t> a, std::span<const int64_t> b, std::span<int64_t> total) {
  HW_CHECK(a.size() == total.size() && b.size() == total.size());
  for (size_t i = 0; i < total.size(); ++i) {
    total[i] = static_cast<int64_t>(static_cast<uint64_t>(a[i]) + static_cast<uint64_t>(b[i]));
  }
}

}  // namespace heavywater
