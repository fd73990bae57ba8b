#include "tests/worker/rank/plain_reference.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"

namespace heavywater {
namespace {

double Stored(float value, KvDtype dtype) {
  return dtype == KvDtype::kFloat32 ? value : BFloat16ToFloat(FloatToBFloat16(value));
}

int64_t Fixed(double probability) { return std::llrint(probability * 4294967296.0); }

bool Votes(Policy policy) { return policy == Policy::kSnapKv || policy == Policy::kSnapKvH2o; }
bool AddsScores(Policy policy) { return policy == Policy::kH2o || policy == Policy::kSnapKvH2o; }
bool Evicts(Policy policy) { return AddsScores(policy) || policy == Policy::kStreaming; }

// Sum (the average's order) or maximum over the neighbours; outside counts as 0.
Ledger Pooled(const std::vector<int64_t>& votes, Pooling pooling, int kernel) {
  Ledger pooled;
  const int count = static_cast<int>(votes.size());
  for (int i = 0; i < count; ++i) {
    int64_t sum = 0;
    int64_t largest = 0;
    for (int j = i - kernel / 2; j <= i + kernel / 2; ++j) {
      const int64_t vote = j >= 0 && j < count ? votes[j] : 0;
      sum += vote;
      largest = std::max(largest, vote);
    }
    pooled[i] = pooling == Pooling::kMax ? largest : sum;
    if (pooling == Pooling::kNone) pooled[i] = votes[i];
  }
  return pooled;
}

}  // namespace

PlainPolicy PlainPolicyOf(const PolicyOptions& options) {
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
          .decay = options.decay};
}

void PlainLayer::Remember(std::span<const float> k, std::span<const float> v) {
  const size_t width = static_cast<size_t>(shape_.num_kv_heads) * shape_.head_dim;
  for (size_t i = 0; i < k.size(); i += width) {
    Rows key, value;
    for (size_t j = 0; j < width; ++j) {
      key.push_back(Stored(k[i + j], shape_.dtype));
      value.push_back(Stored(v[i + j], shape_.dtype));
    }
    keys_.push_back(std::move(key));
    values_.push_back(std::move(value));
  }
}

std::vector<double> PlainLayer::AttendHead(std::span<const float> query, int kv_head,
                                           const std::vector<Position>& positions,
                                           std::span<float> out) const {
  // As the backends get it: the scale is a float.
  const double scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  const int first = kv_head * shape_.head_dim;
  std::vector<double> weights;
  double largest = -std::numeric_limits<double>::infinity();
  for (Position position : positions) {
    double dot = 0;
    for (int i = 0; i < shape_.head_dim; ++i) dot += query[i] * keys_[position][first + i];
    weights.push_back(dot * scale);
    largest = std::max(largest, dot * scale);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (double& weight : weights) weight /= sum;
  for (int i = 0; i < shape_.head_dim; ++i) {
    double value = 0;
    for (size_t j = 0; j < positions.size(); ++j) {
      value += weights[j] * values_[positions[j]][first + i];
    }
    out[i] = static_cast<float>(value);
  }
  return weights;
}

std::vector<float> PlainLayer::Prompt(std::span<const float> q, std::span<const float> k,
                                      std::span<const float> v) {
  HW_CHECK(keys_.empty());
  Remember(k, v);
  prompt_tokens_ = tokens_seen();
  const int num_sets = policy_.scope == Scope::kLayer ? 1 : shape_.num_kv_heads;
  sets_.resize(num_sets);
  gains_.resize(num_sets);
  choices_.resize(num_sets);

  const int64_t window = std::min(policy_.window, prompt_tokens_);
  std::vector<std::vector<int64_t>> sums(num_sets, std::vector<int64_t>(prompt_tokens_));
  std::vector<float> out(q.size());
  std::vector<Position> visible;
  for (int64_t t = 0; t < prompt_tokens_; ++t) {
    visible.push_back(static_cast<Position>(t));
    const bool counts =
        policy_.policy == Policy::kH2o || (Votes(policy_.policy) && t >= prompt_tokens_ - window);
    for (int head = 0; head < shape_.num_query_heads; ++head) {
      const int kv_head = head / (shape_.num_query_heads / shape_.num_kv_heads);
      const size_t row = (t * shape_.num_query_heads + head) * shape_.head_dim;
      const std::vector<double> probabilities =
          AttendHead(q.subspan(row, shape_.head_dim), kv_head, visible,
                     std::span(out).subspan(row, shape_.head_dim));
      for (size_t p = 0; counts && p < visible.size(); ++p) {
        sums[SetOf(kv_head)][p] += Fixed(probabilities[p]);
      }
    }
  }

  for (int set = 0; set < num_sets; ++set) {
    for (Position p = 0; p < prompt_tokens_; ++p) sets_[set][p] = sums[set][p];
    if (policy_.policy == Policy::kFull) continue;
    Ledger ranking = sets_[set];
    int64_t recent = policy_.recent_tokens;
    if (Votes(policy_.policy)) {
      sums[set].resize(prompt_tokens_ - window);
      ranking = Pooled(sums[set], policy_.pooling, policy_.pool_kernel);
      for (Position p = 0; p < prompt_tokens_; ++p) ranking.try_emplace(p, 0);
      recent = std::min(window, policy_.budget_tokens - policy_.sink_tokens);
    }
    Choose(set, ranking, recent);
  }
  return out;
}

std::vector<float> PlainLayer::Append(std::span<const float> q, std::span<const float> k,
                                      std::span<const float> v) {
  const int64_t tokens =
      static_cast<int64_t>(q.size()) / (shape_.num_query_heads * shape_.head_dim);
  const int64_t since_prompt = tokens_seen() - prompt_tokens_;
  const int64_t interval = policy_.plan_interval_steps;
  return Append(q, k, v, (since_prompt + tokens) / interval > since_prompt / interval);
}

std::vector<float> PlainLayer::Append(std::span<const float> q, std::span<const float> k,
                                      std::span<const float> v, bool plan_due) {
  const int64_t first = tokens_seen();
  Remember(k, v);
  std::vector<float> out(q.size());
  for (int64_t t = first; t < tokens_seen(); ++t, ++since_plan_) {
    for (Ledger& set : sets_) set[static_cast<Position>(t)] = 0;
    for (int head = 0; head < shape_.num_query_heads; ++head) {
      const int kv_head = head / (shape_.num_query_heads / shape_.num_kv_heads);
      std::vector<Position> visible;
      for (const auto& [position, score] : sets_[SetOf(kv_head)]) visible.push_back(position);
      const size_t row = ((t - first) * shape_.num_query_heads + head) * shape_.head_dim;
      const std::vector<double> probabilities =
          AttendHead(q.subspan(row, shape_.head_dim), kv_head, visible,
                     std::span(out).subspan(row, shape_.head_dim));
      for (size_t i = 0; i < visible.size(); ++i) {
        gains_[SetOf(kv_head)][visible[i]] += Fixed(probabilities[i]);
      }
    }
  }
  if (plan_due && Evicts(policy_.policy)) Plan();
  return out;
}

void PlainLayer::ForgetGains() {
  for (Ledger& gains : gains_) gains.clear();
  since_plan_ = 0;
}

void PlainLayer::Plan() {
  double decay = 1;
  for (int64_t i = 0; i < since_plan_; ++i) decay *= policy_.decay;
  for (size_t set = 0; set < sets_.size(); ++set) {
    for (auto& [position, score] : sets_[set]) {
      if (!AddsScores(policy_.policy)) continue;
      score = std::llrint(static_cast<double>(score) * decay) + gains_[set][position];
    }
    gains_[set].clear();
    Choose(static_cast<int>(set), Ledger(sets_[set]), policy_.recent_tokens);
  }
  since_plan_ = 0;
}

// Leaves sinks, the last `recent` positions, and the best of the rest.
void PlainLayer::Choose(int set, const Ledger& ranking, int64_t recent) {
  choices_[set] = PlainChoice();
  if (static_cast<int64_t>(ranking.size()) <= policy_.budget_tokens) return;
  std::vector<std::pair<int64_t, Position>> rest;  // (-score, position): best first
  int64_t room = policy_.budget_tokens;
  for (const auto& [position, score] : ranking) {
    if (position < policy_.sink_tokens || position >= tokens_seen() - recent) {
      --room;
    } else {
      rest.emplace_back(-score, position);
      choices_[set].ranking[position] = score;
    }
  }
  std::sort(rest.begin(), rest.end());
  HW_CHECK(room >= 0 && room <= static_cast<int64_t>(rest.size()));
  if (room > 0) choices_[set].cut = -rest[room - 1].first;
  for (size_t i = room; i < rest.size(); ++i) sets_[set].erase(rest[i].second);
}

}  // namespace heavywater
