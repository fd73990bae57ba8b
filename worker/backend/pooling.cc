#include "worker/backend/pooling.h"

#include <algorithm>
#include <numeric>

namespace heavywater {
namespace {

int64_t Maximum(std::span<const int64_t> window, bool reaches_outside) {
  const int64_t inside = *std::max_element(window.begin(), window.end());
  return reaches_outside ? std::max<int64_t>(inside, 0) : inside;
}

}  // namespace

void PoolRow(std::span<const int64_t> votes, Pooling pooling, int kernel, int64_t* to) {
  const auto count = static_cast<int64_t>(votes.size());
  const int64_t reach = pooling == Pooling::kNone ? 0 : kernel / 2;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = std::max<int64_t>(i - reach, 0);
    const int64_t last = std::min(i + reach, count - 1);
    const auto window = votes.subspan(first, last - first + 1);
    to[i] = pooling == Pooling::kMax
                ? Maximum(window, static_cast<int64_t>(window.size()) < 2 * reach + 1)
                : std::accumulate(window.begin(), window.end(), int64_t{0});
  }
}

}  // namespace heavywater
