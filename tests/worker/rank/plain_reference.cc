#include "tests/worker/rank/plain_reference.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "cache_service/base/float16.h"

namespace heavywater {

double Stored(float value, KvDtype dtype) {
  if (dtype == KvDtype::kFloat32) return value;
  return dtype == KvDtype::kBFloat16 ? BFloat16ToFloat(FloatToBFloat16(value))
                                     : Float16ToFloat(FloatToFloat16(value));
}

namespace {

bool Votes(Policy policy) {
  return policy == Policy::kSnapKv || policy == Policy::kSnapKvH2o || policy == Policy::kPyramidKv;
}
bool AddsScores(Policy policy) {
  return policy == Policy::kH2o || policy == Policy::kSnapKvH2o || policy == Policy::kPyramidKv ||
         policy == Policy::kScissorhands;
}
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

// The scale as the backends get it: a float.
double PlainLayer::Logit(std::span<const float> query, int kv_head, Position position) const {
  double dot = 0;
  for (int i = 0; i < shape_.head_dim; ++i) {
    dot += query[i] * keys_[position][kv_head * shape_.head_dim + i];
  }
  return dot * static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
}

double PlainLayer::LogSumExp(std::span<const float> query, int kv_head,
                             const std::vector<Position>& positions) const {
  double largest = -std::numeric_limits<double>::infinity();
  for (Position p : positions) largest = std::max(largest, Logit(query, kv_head, p));
  double sum = 0;
  for (Position p : positions) sum += std::exp(Logit(query, kv_head, p) - largest);
  return largest + std::log(sum);
}

std::vector<double> PlainLayer::AttendHead(std::span<const float> query, int kv_head,
                                           const std::vector<Position>& positions,
                                           std::span<float> out) const {
  const int first = kv_head * shape_.head_dim;
  std::vector<double> weights;
  double largest = -std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < positions.size(); ++j) {
    weights.push_back(shape_.rope_frequencies.empty()
                          ? Logit(query, kv_head, positions[j])
                          : LogitAtPlaces(query, static_cast<int>(positions.size()) - 1, kv_head,
                                          positions[j], static_cast<int>(j)));
    largest = std::max(largest, weights.back());
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
  demoted_.resize(num_sets);
  unreported_.resize(shape_.num_kv_heads);
  fresh_.resize(shape_.num_kv_heads);
  sketches_.assign(shape_.num_kv_heads, PlainSketch({.recall = policy_.recall,
                                                     .head_dim = shape_.head_dim,
                                                     .page_tokens = shape_.page_tokens}));
  Observe(q);

  TakePyramidBudget();
  budgets_.assign(num_sets, policy_.budget_tokens);
  recents_.assign(num_sets, policy_.recent_tokens);
  at_prompt_.resize(num_sets);
  plans_.resize(num_sets);
  const int64_t window =
      std::min(counts_pivotal() ? policy_.history_window : policy_.window, prompt_tokens_);
  if (policy_.policy != Policy::kH2o) first_scored_ = prompt_tokens_ - window;
  std::vector<std::vector<int64_t>> sums(num_sets, std::vector<int64_t>(prompt_tokens_));
  std::vector<float> out(q.size());
  std::vector<Position> visible;
  for (int64_t t = 0; t < prompt_tokens_; ++t) {
    visible.push_back(static_cast<Position>(t));
    const bool counts =
        policy_.policy == Policy::kH2o ||
        ((Votes(policy_.policy) || counts_pivotal()) && t >= prompt_tokens_ - window);
    for (int head = 0; head < shape_.num_query_heads; ++head) {
      const int kv_head = head / (shape_.num_query_heads / shape_.num_kv_heads);
      const size_t row = (t * shape_.num_query_heads + head) * shape_.head_dim;
      const std::vector<double> probabilities =
          AttendHead(q.subspan(row, shape_.head_dim), kv_head, visible,
                     std::span(out).subspan(row, shape_.head_dim));
      for (size_t p = 0; counts && p < visible.size(); ++p) {
        sums[SetOf(kv_head)][p] += Given(probabilities[p], t);
      }
    }
  }

  std::vector<Ledger> rankings(num_sets);
  int64_t recent = policy_.recent_tokens;
  if (Votes(policy_.policy)) recent = std::min(window, policy_.budget_tokens - policy_.sink_tokens);
  for (int set = 0; set < num_sets; ++set) {
    for (Position p = 0; p < prompt_tokens_; ++p) sets_[set][p] = sums[set][p];
    Ledger& ranking = rankings[set];
    ranking = sets_[set];
    if (Votes(policy_.policy)) {
      sums[set].resize(prompt_tokens_ - window);
      ranking = Pooled(sums[set], policy_.pooling, policy_.pool_kernel);
      for (const auto& [position, vote] : ranking) {
        const int shares = policy_.pooling == Pooling::kAverage ? policy_.pool_kernel : 1;
        if (policy_.pooled_seeds) {
          sets_[set][position] = std::llrint(static_cast<double>(vote) / shares);
        }
      }
      for (Position p = 0; p < prompt_tokens_; ++p) ranking.try_emplace(p, 0);
    }
    if (counts_pivotal()) at_prompt_[set] = sets_[set];
  }
  const bool keeps_all = policy_.policy == Policy::kFull || policy_.policy == Policy::kOracle;
  if (policy_.adaptive) DivideBudget(rankings, recent);
  for (int set = 0; set < num_sets && !keeps_all; ++set) {
    Choose(set, rankings[set], recent);
  }
  Sketch();
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
  const int group = shape_.num_query_heads / shape_.num_kv_heads;
  const size_t width = static_cast<size_t>(group) * shape_.head_dim;  // of a KV head's queries
  Remember(k, v);
  Observe(q);
  std::vector<float> out(q.size());
  for (int64_t t = first; t < tokens_seen(); ++t, ++since_plan_) {
    for (Ledger& set : sets_) set[static_cast<Position>(t)] = 0;
    for (int kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      const Ledger& residents = sets_[SetOf(kv_head)];
      std::vector<Position> visible;
      for (const auto& [position, score] : residents) visible.push_back(position);
      const size_t row = ((t - first) * shape_.num_kv_heads + kv_head) * width;
      std::vector<double> lse;
      for (int g = 0; g < group && policy_.recall.enabled; ++g) {
        lse.push_back(
            LogSumExp(q.subspan(row + g * shape_.head_dim, shape_.head_dim), kv_head, visible));
      }
      const std::vector<Position> picks = Pick(kv_head, q.subspan(row, width), lse);
      if (policy_.policy == Policy::kOracle)
        visible = TopOf(q.subspan(row, width), kv_head, visible);
      visible.insert(visible.end(), picks.begin(), picks.end());
      for (int g = 0; g < group; ++g) {
        const size_t at = row + g * shape_.head_dim;
        const std::vector<double> probabilities =
            AttendHead(q.subspan(at, shape_.head_dim), kv_head, visible,
                       std::span(out).subspan(at, shape_.head_dim));
        for (size_t i = 0; i < visible.size(); ++i) {
          Ledger& gains = residents.contains(visible[i]) ? gains_[SetOf(kv_head)] : fresh_[kv_head];
          gains[visible[i]] += Given(probabilities[i], t);
        }
      }
    }
  }
  if (plan_due && Evicts(policy_.policy)) Plan();
  return out;
}

// Squares of the queries, summed over each KV head's group.
void PlainLayer::Observe(std::span<const float> q) {
  const int group = shape_.num_query_heads / shape_.num_kv_heads;
  const size_t width = static_cast<size_t>(group) * shape_.head_dim;
  for (size_t row = 0; row < q.size() / width; ++row) {
    std::vector<double> squares(shape_.head_dim);
    for (size_t i = 0; i < width; ++i) {
      const double value = q[row * width + i];
      squares[i % shape_.head_dim] += value * value;
    }
    sketches_[row % shape_.num_kv_heads].Observe(std::move(squares));
  }
}

std::vector<Position> PlainLayer::Pick(int kv_head, std::span<const float> q,
                                       std::vector<double> lse) {
  if (!policy_.recall.enabled || sketched_tokens_ == 0) return {};
  std::vector<Position> demoted;
  for (const auto& [position, entry] : demoted_[SetOf(kv_head)]) {
    if (host_.has_copy(kv_head, position)) demoted.push_back(position);
  }
  std::vector<std::vector<float>> queries;
  for (size_t i = 0; i < q.size(); i += shape_.head_dim) {
    queries.emplace_back(q.begin() + i, q.begin() + i + shape_.head_dim);
  }
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  std::vector<Position> picks = sketches_[kv_head].Pick(queries, lse, scale, demoted);
  std::erase_if(picks, [&](Position position) { return host_.rests(kv_head, position); });
  return picks;
}

void PlainLayer::ForgetGains() {
  for (Ledger& gains : gains_) gains.clear();
  for (Ledger& gains : fresh_) gains.clear();
  since_plan_ = 0;
}

std::vector<std::vector<double>> PlainLayer::KeysOf(int kv_head) const {
  std::vector<std::vector<double>> keys;
  for (const Rows& row : keys_) {
    const auto first = row.begin() + kv_head * shape_.head_dim;
    keys.emplace_back(first, first + shape_.head_dim);
  }
  return keys;
}

std::vector<std::vector<double>> PlainLayer::KeysWithCopy(int kv_head) const {
  const std::vector<std::vector<double>> all = KeysOf(kv_head);
  std::vector<std::vector<double>> keys;
  for (size_t i = 0; i < all.size(); ++i) {
    if (host_.has_copy(kv_head, static_cast<Position>(i))) keys.push_back(all[i]);
  }
  return keys;
}

// After a plan or the prompt: codes of what is new, once something was demoted.
void PlainLayer::Sketch() {
  const bool any = std::any_of(demoted_.begin(), demoted_.end(),
                               [](const auto& demoted) { return !demoted.empty(); });
  if (!policy_.recall.enabled || !any) return;
  const bool needed = sketched_tokens_ == 0 || tokens_seen() - sketched_tokens_ >= 16 ||
                      tokens_seen() / shape_.page_tokens > sketched_tokens_ / shape_.page_tokens ||
                      tokens_seen() - policy_.recent_tokens > sketched_tokens_;
  for (int head = 0; head < shape_.num_kv_heads && needed; ++head) {
    if (sketched_tokens_ == 0) sketches_[head].Choose(KeysWithCopy(head));
    sketches_[head].Encode(KeysOf(head), static_cast<Position>(sketched_tokens_));
  }
  if (needed) sketched_tokens_ = tokens_seen();
}

void PlainLayer::Demote(int set, Position position, int64_t score) {
  demoted_[set][position] = {.score = score, .clock = clock_};
}

void PlainLayer::TakeReports(int set) {
  Ledger reported;
  for (int head = 0; head < shape_.num_kv_heads; ++head) {
    if (SetOf(head) != set) continue;
    std::vector<std::pair<int64_t, Position>> ranked;
    for (const auto& [position, gain] : unreported_[head]) {
      if (gain > 0 && host_.proposes(head, position)) ranked.emplace_back(-gain, position);
    }
    std::sort(ranked.begin(), ranked.end());
    ranked.resize(std::min<size_t>(ranked.size(), policy_.recall.promote_candidates));
    for (const auto& [gain, position] : ranked) {
      reported[position] -= gain;
      unreported_[head].erase(position);
    }
  }
  for (const auto& [position, gain] : reported) {
    Demoted& entry = demoted_[set].at(position);
    double decay = 1;
    for (int64_t i = entry.clock; i < clock_; ++i) decay *= policy_.decay;
    entry.score = std::llrint(static_cast<double>(entry.score) * decay) + gain;
    entry.clock = clock_;
    if (position >= host_.promotable_end() || !host_.promotable(set, position)) continue;
    sets_[set][position] = entry.score;  // competes
  }
}

void PlainLayer::Plan() {
  double decay = 1;
  for (int64_t i = 0; i < since_plan_; ++i) decay *= policy_.decay;
  clock_ += since_plan_;
  for (int head = 0; head < shape_.num_kv_heads; ++head) {
    for (const auto& [position, gain] : fresh_[head]) unreported_[head][position] += gain;
    fresh_[head].clear();
  }
  for (size_t set = 0; set < sets_.size(); ++set) {
    if (counts_pivotal()) CountHistory(static_cast<int>(set));
    for (auto& [position, score] : sets_[set]) {
      if (!AddsScores(policy_.policy) || counts_pivotal()) continue;
      score = std::llrint(static_cast<double>(score) * decay) + gains_[set][position];
    }
    gains_[set].clear();
    const bool full = static_cast<int64_t>(sets_[set].size()) > budgets_[set];
    if (policy_.recall.enabled && full && AddsScores(policy_.policy)) {
      TakeReports(static_cast<int>(set));
    }
    Choose(static_cast<int>(set), Ledger(sets_[set]), recents_[set]);
  }
  since_plan_ = 0;
  Sketch();
}

Ledger PlainLayer::Exposed(Ledger ranking) const {
  const bool votes = tokens_seen() == prompt_tokens_ && Votes(policy_.policy);
  if (policy_.exposure == 0 || votes) return ranking;
  for (auto& [position, score] : ranking) {
    const auto queries =
        static_cast<double>(tokens_seen() - std::max<int64_t>(position, first_scored_));
    score = std::llrint(static_cast<double>(score) / std::pow(queries, policy_.exposure));
  }
  return ranking;
}

// Leaves sinks, the last `recent` positions, and the best of the rest.
void PlainLayer::Choose(int set, Ledger ranking, int64_t recent) {
  choices_[set] = PlainChoice();
  ranking = Exposed(std::move(ranking));
  if (static_cast<int64_t>(ranking.size()) <= budgets_[set]) return;
  std::vector<std::pair<int64_t, Position>> rest;  // (-score, position): best first
  int64_t room = budgets_[set];
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
  for (size_t i = room; i < rest.size(); ++i) {
    const Position position = rest[i].second;
    if (policy_.recall.enabled) Demote(set, position, sets_[set][position]);
    sets_[set].erase(position);
  }
  for (const auto& [position, score] : sets_[set]) {  // those that came back
    if (demoted_[set].erase(position) == 0) continue;
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      if (SetOf(head) == set) unreported_[head].erase(position);
    }
  }
}

}  // namespace heavywater
