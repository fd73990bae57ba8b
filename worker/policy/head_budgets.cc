#include "worker/policy/head_budgets.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

// What every head gets. A ratio such as 0.29 has no exact double: 0.29 * 100 must still
// be 29.
int64_t Least(int64_t even, double floor) {
  return static_cast<int64_t>(std::floor(floor * static_cast<double>(even) + 1e-6));
}

std::span<const int64_t> OfHead(const HeadScores& scores, int head) {
  return scores.scores.subspan(head * scores.num_tokens + scores.first, scores.end - scores.first);
}

// How many of the `total` highest scores each head has.
std::vector<int64_t> CountHighest(const HeadScores& scores, int64_t total) {
  std::vector<int64_t> all;
  for (int head = 0; head < scores.num_heads; ++head) {
    const std::span<const int64_t> own = OfHead(scores, head);
    all.insert(all.end(), own.begin(), own.end());
  }
  std::vector<int64_t> counts(scores.num_heads, 0);
  if (total == 0) return counts;
  std::nth_element(all.begin(), all.begin() + total - 1, all.end(), std::greater<>());
  const int64_t cut = all[total - 1];
  int64_t at_the_cut = total;
  for (int head = 0; head < scores.num_heads; ++head) {
    const std::span<const int64_t> own = OfHead(scores, head);
    counts[head] = std::count_if(own.begin(), own.end(), [cut](int64_t s) { return s > cut; });
    at_the_cut -= counts[head];
  }
  for (int head = 0; head < scores.num_heads; ++head) {
    const std::span<const int64_t> own = OfHead(scores, head);
    const int64_t equal = std::min<int64_t>(std::count(own.begin(), own.end(), cut), at_the_cut);
    counts[head] += equal;
    at_the_cut -= equal;
  }
  return counts;
}

}  // namespace

std::vector<int64_t> DivideSlots(const HeadScores& scores, int64_t even, double floor) {
  const int64_t candidates = scores.end - scores.first;
  HW_CHECK(even >= 0 && even <= candidates);
  const int64_t total = scores.num_heads * even;
  const std::vector<int64_t> counts = CountHighest(scores, total);
  const int64_t least = Least(even, floor);
  std::vector<int64_t> slots(scores.num_heads, least);
  for (int head = 0; head < scores.num_heads && even > 0; ++head) {
    slots[head] += (even - least) * counts[head] / even;
  }
  std::vector<int> order(scores.num_heads);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&counts](int a, int b) { return counts[a] > counts[b]; });
  int64_t left = total - std::accumulate(slots.begin(), slots.end(), int64_t{0});
  while (left > 0) {
    for (const int head : order) {
      if (left == 0 || slots[head] == candidates) continue;
      ++slots[head];
      --left;
    }
  }
  return slots;
}

std::vector<int64_t> MostSlots(int num_heads, int own_heads, int64_t even, int64_t candidates,
                               double floor) {
  const int64_t least = Least(even, floor);
  int64_t left = num_heads * even - (num_heads - own_heads) * least;
  std::vector<int64_t> most;
  for (int after = own_heads - 1; after >= 0; --after) {
    most.push_back(std::min(candidates, left - after * least));
    left -= most.back();
  }
  return most;
}

LayerBudget BudgetOfHead(const LayerBudget& even, int64_t sink_tokens, int64_t kept) {
  LayerBudget budget = {.budget_tokens = even.budget_tokens > 0 ? kept : 0,
                        .prompt_budget_tokens = kept};
  if (even.recent_tokens == 0) return budget;  // all new tokens stay
  budget.recent_tokens = std::clamp<int64_t>(even.recent_tokens * kept / even.prompt_budget_tokens,
                                             1, kept - sink_tokens);
  return budget;
}

}  // namespace heavywater
