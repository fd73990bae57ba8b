// What sets scissorhands, pyramidkv, oracle and places in the cache apart, written plainly.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "cache_service/base/check.h"
#include "tests/worker/rank/plain_reference.h"

namespace heavywater {

PlainPolicy PlainPolicyOf(const PolicyOptions& options, int layer, int num_layers) {
  HW_CHECK(options.heavy_tokens > 0 && options.recent_tokens > 0);
  return {.policy = options.policy,
          .scope = options.scope,
          .budget_tokens = options.heavy_tokens + options.recent_tokens,
          .recent_tokens = options.policy == Policy::kStreaming
                               ? options.heavy_tokens + options.recent_tokens - options.sink_tokens
                               : options.recent_tokens,
          .sink_tokens = options.sink_tokens,
          .window = options.window,
          .pooling = options.pooling,
          .pool_kernel = options.pool_kernel,
          .plan_interval_steps = options.plan_interval_steps,
          .decay = options.decay,
          .pooled_seeds = options.pooled_seeds,
          .exposure = options.exposure,
          .history_window = options.history_window,
          .pyramid_beta = options.pyramid_beta,
          .layer = layer,
          .num_layers = num_layers,
          .adaptive = options.head_budgets == HeadBudgets::kAdaptive,
          .head_floor = options.head_budget_floor,
          .recall = options.recall};
}

// Scissorhands: how often was it pivotal for the newest queries? Whole plans, as few of
// the newest as have the window's queries; of the prompt's count what is left by now.
void PlainLayer::CountHistory(int set) {
  plans_[set].emplace_back(since_plan_, gains_[set]);
  const double left =
      std::max(0.0, static_cast<double>(policy_.history_window - (tokens_seen() - prompt_tokens_)) /
                        static_cast<double>(policy_.history_window));
  for (auto& [position, score] : sets_[set]) {
    const auto before = at_prompt_[set].find(position);
    score = before == at_prompt_[set].end()
                ? 0
                : std::llrint(static_cast<double>(before->second) * left);
    int64_t queries = 0;
    for (auto plan = plans_[set].rbegin();
         plan != plans_[set].rend() && queries < policy_.history_window; ++plan) {
      queries += plan->first;
      const auto counted = plan->second.find(position);
      if (counted != plan->second.end()) score += counted->second;
    }
  }
}

// The oracle: sinks, the newest, and what the group's queries together pay most.
std::vector<Position> PlainLayer::TopOf(std::span<const float> queries, int kv_head,
                                        const std::vector<Position>& visible) const {
  std::map<Position, int64_t> paid;
  std::vector<float> unused(shape_.head_dim);
  for (size_t i = 0; i < queries.size(); i += shape_.head_dim) {
    const std::vector<double> probabilities =
        AttendHead(queries.subspan(i, shape_.head_dim), kv_head, visible, unused);
    for (size_t j = 0; j < visible.size(); ++j) {
      paid[visible[j]] += std::llrint(probabilities[j] * 4294967296.0);
    }
  }
  std::vector<std::pair<int64_t, Position>> order;
  for (const auto& [position, attention] : paid) {
    const bool stays =
        position < policy_.sink_tokens || position > visible.back() - policy_.recent_tokens;
    order.emplace_back(stays ? std::numeric_limits<int64_t>::min() : -attention, position);
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min<size_t>(order.size(), policy_.budget_tokens));
  std::vector<Position> top;
  for (const auto& [rank, position] : order) top.push_back(position);
  std::sort(top.begin(), top.end());
  return top;
}

// Pairs turn in float, as the backends say; what is stored is rounded once more.
double PlainLayer::LogitAtPlaces(std::span<const float> query, int query_place, int kv_head,
                                 Position position, int place) const {
  const int half = shape_.head_dim / 2;
  const double* key = keys_[position].data() + kv_head * shape_.head_dim;
  double dot = 0;
  for (int i = 0; i < half; ++i) {
    const auto turned = [&](double x, double y, int at) {
      const double angle = at * shape_.rope_frequencies[i];
      const auto cosine = static_cast<float>(std::cos(angle));
      const auto sine = static_cast<float>(std::sin(angle));
      const auto a = static_cast<float>(x);
      const auto b = static_cast<float>(y);
      return std::pair(a * cosine - b * sine, b * cosine + a * sine);
    };
    const auto [q, q_after] = turned(query[i], query[half + i], query_place);
    const auto [k, k_after] = turned(key[i], key[half + i], place);
    dot += q * Stored(k, shape_.dtype) + q_after * Stored(k_after, shape_.dtype);
  }
  return dot * static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
}

int64_t PlainLayer::Given(double probability, int64_t query) const {
  if (!counts_pivotal()) return std::llrint(probability * 4294967296.0);
  const double mean = 1 / static_cast<double>(query + 1);
  return probability > mean * (1 + 1.0 / 16384) ? int64_t{1} << 32 : 0;
}

// The pyramid's line, summed up layer by layer and cut to whole slots.
void PlainLayer::TakePyramidBudget() {
  if (policy_.policy != Policy::kPyramidKv || policy_.num_layers == 1) return;
  const int64_t kept =
      std::min({policy_.window, prompt_tokens_, policy_.budget_tokens - policy_.sink_tokens}) +
      policy_.sink_tokens;
  const double mean = static_cast<double>(policy_.budget_tokens - kept);
  const double room = static_cast<double>(std::max<int64_t>(prompt_tokens_ - kept, 0));
  double lowest = mean / policy_.pyramid_beta;
  double highest = 2 * mean - lowest;
  if (highest > room) {
    highest = std::max(room, mean);
    lowest = 2 * mean - highest;
  }
  int64_t before = 0;
  int64_t slots = 0;
  double sum = 0;
  for (int layer = 0; layer <= policy_.layer; ++layer) {
    sum += highest + (lowest - highest) * layer / (policy_.num_layers - 1);
    slots = static_cast<int64_t>(std::floor(sum + 1e-6)) - before;
    before += slots;
  }
  slots += kept;
  policy_.recent_tokens =
      std::clamp<int64_t>(std::llround(static_cast<double>(policy_.recent_tokens * slots) /
                                       static_cast<double>(policy_.budget_tokens)),
                          1, slots - policy_.sink_tokens);
  policy_.budget_tokens = slots;
}

// Ada-KV: one list of the layer's unprotected positions, best first; each head's slots
// follow its part of the best.
void PlainLayer::DivideBudget(const std::vector<Ledger>& rankings, int64_t recent) {
  if (prompt_tokens_ <= policy_.budget_tokens) return;
  const auto heads = static_cast<int64_t>(rankings.size());
  std::vector<std::tuple<int64_t, int64_t, Position>> all;  // -score, head, position
  for (int64_t head = 0; head < heads; ++head) {
    for (const auto& [position, score] : Exposed(rankings[head])) {
      if (position < policy_.sink_tokens || position >= prompt_tokens_ - recent) continue;
      all.emplace_back(-score, head, position);
    }
  }
  std::sort(all.begin(), all.end());
  const int64_t each = policy_.budget_tokens - policy_.sink_tokens - recent;
  const auto least =
      static_cast<int64_t>(std::floor(policy_.head_floor * static_cast<double>(each) + 1e-6));
  std::vector<int64_t> best(heads, 0);
  for (int64_t i = 0; i < heads * each; ++i) ++best[std::get<1>(all[i])];
  std::vector<int64_t> slots(heads, least);
  int64_t left = heads * (each - least);
  for (int64_t head = 0; head < heads && each > 0; ++head) {
    const int64_t more = (each - least) * best[head] / each;
    slots[head] += more;
    left -= more;
  }
  // One more for the heads with most of the best, the first of equals, while there are any.
  const int64_t most = prompt_tokens_ - policy_.sink_tokens - recent;
  std::vector<bool> given(heads, false);
  while (left > 0) {
    int64_t next = -1;
    for (int64_t head = 0; head < heads; ++head) {
      if (given[head] || slots[head] == most) continue;
      if (next < 0 || best[head] > best[next]) next = head;
    }
    if (next < 0) {
      given.assign(heads, false);
      continue;
    }
    given[next] = true;
    ++slots[next];
    --left;
  }
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t budget = policy_.sink_tokens + recent + slots[head];
    recents_[head] = std::clamp<int64_t>(policy_.recent_tokens * budget / policy_.budget_tokens, 1,
                                         budget - policy_.sink_tokens);
    budgets_[head] = budget;
  }
}

}  // namespace heavywater
