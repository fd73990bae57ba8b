// The policies (worker/policy/policy.h) once more, written plainly: every position's K and V is
// kept, sets are maps, probabilities are doubles. What the rank keeps must equal
// this on identical Q, K and V. Shares no code with it but names.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "cache_service/base/ids.h"
#include "tests/worker/rank/plain_recall.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/policy.h"

namespace heavywater {

// A policy with its numbers, resolved.
struct PlainPolicy {
  Policy policy = Policy::kFull;
  Scope scope = Scope::kLayer;
  int64_t budget_tokens = 0;
  int64_t recent_tokens = 0;
  int64_t sink_tokens = 0;
  int64_t window = 32;
  Pooling pooling = Pooling::kAverage;
  int pool_kernel = 5;
  int plan_interval_steps = 1;
  double decay = 1.0;
  bool pooled_seeds = false;
  double exposure = 0;
  int64_t history_window = 400;
  double pyramid_beta = 20;
  int layer = 0;  // of num_layers: their budgets differ with pyramidkv
  int num_layers = 1;
  bool adaptive = false;  // the layer's slots go where its best positions are
  double head_floor = 0.2;
  RecallOptions recall;
};
// From options that give their budget in tokens.
PlainPolicy PlainPolicyOf(const PolicyOptions& options, int layer = 0, int num_layers = 1);

// All heads of a layer, however many ranks share them.
struct PlainShape {
  int num_query_heads = 1;
  int num_kv_heads = 1;
  int head_dim = 8;
  KvDtype dtype = KvDtype::kFloat32;
  int page_tokens = 16;
  // Not empty: keys and queries turn to their places among what is attended to.
  std::vector<double> rope_frequencies = {};
};

// `value` as a cache of this type gives it back.
double Stored(float value, KvDtype dtype);

using Ledger = std::map<Position, int64_t>;  // of one set: resident -> score, 2^-32

// What the last choice in a set was made from, to judge differences between
// runs whose scores differ in the last bits.
struct PlainChoice {
  Ledger ranking;   // of the unprotected
  int64_t cut = 0;  // the lowest that stayed; 0 when nothing had to go
};

// One layer of one sequence.
class PlainLayer {
 public:
  PlainLayer(const PlainShape& shape, const PlainPolicy& policy) : shape_(shape), policy_(policy) {}

  // The whole prompt, once. q [n][num_query_heads][head_dim], k and v
  // [n][num_kv_heads][head_dim]; the result is like q.
  std::vector<float> Prompt(std::span<const float> q, std::span<const float> k,
                            std::span<const float> v);
  // Tokens after it, of one append; plans at the end when the interval says so.
  std::vector<float> Append(std::span<const float> q, std::span<const float> k,
                            std::span<const float> v);
  // The same, with the decision whether to plan from outside.
  std::vector<float> Append(std::span<const float> q, std::span<const float> k,
                            std::span<const float> v, bool plan_due);

  // A step that failed on some rank: gains since the last plan are lost.
  void ForgetGains();

  void SetHostMemory(PlainHostMemory host) { host_ = std::move(host); }

  int64_t tokens_seen() const { return static_cast<int64_t>(keys_.size()); }
  const std::vector<Ledger>& sets() const { return sets_; }             // one, or one per KV head
  const std::vector<PlainChoice>& choices() const { return choices_; }  // likewise
  bool counts_pivotal() const { return policy_.policy == Policy::kScissorhands; }

 private:
  using Rows = std::vector<double>;  // [num_kv_heads][head_dim] of one position
  struct Demoted {
    int64_t score = 0;
    int64_t clock = 0;  // queries for which it has decayed
  };

  void Remember(std::span<const float> k, std::span<const float> v);
  int SetOf(int kv_head) const { return sets_.size() == 1 ? 0 : kv_head; }
  std::vector<Position> Pick(int kv_head, std::span<const float> q, std::vector<double> lse);
  double LogSumExp(std::span<const float> query, int kv_head,
                   const std::vector<Position>& positions) const;
  double Logit(std::span<const float> query, int kv_head, Position position) const;
  double LogitAtPlaces(std::span<const float> query, int query_place, int kv_head,
                       Position position, int place) const;
  std::vector<Position> TopOf(std::span<const float> queries, int kv_head,
                              const std::vector<Position>& visible) const;
  void Observe(std::span<const float> q);
  std::vector<std::vector<double>> KeysOf(int kv_head) const;
  std::vector<std::vector<double>> KeysWithCopy(int kv_head) const;
  void Demote(int set, Position position, int64_t score);
  // Proposals of the KV heads that share the set, into its scores.
  void TakeReports(int set);
  void Sketch();

  // One query head over `positions`: adds its output; returns probabilities.
  std::vector<double> AttendHead(std::span<const float> query, int kv_head,
                                 const std::vector<Position>& positions,
                                 std::span<float> out) const;
  void Choose(int set, Ledger ranking, int64_t recent);
  void TakePyramidBudget();
  Ledger Exposed(Ledger ranking) const;
  void DivideBudget(const std::vector<Ledger>& rankings, int64_t recent);
  int64_t Given(double probability, int64_t query) const;
  void CountHistory(int set);
  void Plan();

  const PlainShape shape_;
  PlainPolicy policy_;
  std::vector<Rows> keys_;  // [position]
  std::vector<Rows> values_;
  std::vector<int64_t> budgets_;  // by set
  std::vector<int64_t> recents_;  // by set, in decode
  std::vector<Ledger> sets_;
  std::vector<Ledger> gains_;  // since the last plan
  std::vector<PlainChoice> choices_;
  std::vector<Ledger> at_prompt_;  // by set, scissorhands: counts when the prompt ended
  std::vector<std::vector<std::pair<int64_t, Ledger>>> plans_;  // by set: queries, counts
  int64_t first_scored_ = 0;  // the first query whose attention counts
  PlainHostMemory host_;
  std::vector<std::map<Position, Demoted>> demoted_;  // by set
  std::vector<Ledger> unreported_;                    // gains of demoted positions, by KV head
  std::vector<Ledger> fresh_;                         // those since the last plan
  std::vector<PlainSketch> sketches_;                 // by KV head
  int64_t sketched_tokens_ = 0;
  int64_t clock_ = 0;
  int64_t prompt_tokens_ = 0;
  int64_t since_plan_ = 0;
};

}  // namespace heavywater
