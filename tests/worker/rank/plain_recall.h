// Recall (docs/architecture.md) once more and plainly: sketches are tables of
// doubles, sets are maps. Shares no code with the rank or the backends.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "cache_service/base/ids.h"
#include "worker/policy/policy.h"

namespace heavywater {

struct PlainRecallOptions {
  RecallOptions recall;
  int head_dim = 8;
  int page_tokens = 16;
};

// What ranks find in host memory; by default everything.
struct PlainHostMemory {
  std::function<bool(int kv_head, Position position)> has_copy = [](int, Position) { return true; };
  // Its page rests: what is picked there is not read. And whether such positions are proposed
  // by a head, and promoted into a set.
  std::function<bool(int kv_head, Position position)> rests = [](int, Position) { return false; };
  std::function<bool(int kv_head, Position position)> proposes = [](int, Position) { return true; };
  std::function<bool(int set, Position position)> promotable = [](int, Position) { return true; };
  // Positions at or above it are not promoted.
  std::function<int64_t()> promotable_end = [] { return std::numeric_limits<int64_t>::max(); };
};

// One KV head's sketch of a layer's keys.
class PlainSketch {
 public:
  explicit PlainSketch(const PlainRecallOptions& options) : options_(options) {}

  // Squares of the group's queries of one token, summed over its heads.
  void Observe(std::vector<double> squares) { squares_.push_back(std::move(squares)); }
  // keys [position][head_dim], all there are.
  void Choose(const std::vector<std::vector<double>>& keys);
  // Pages from the one that holds `first` on.
  void Encode(const std::vector<std::vector<double>>& keys, Position first);

  // What a token's queries pick of `demoted`: queries [group][head_dim], lse of
  // each over the residents.
  std::vector<Position> Pick(const std::vector<std::vector<float>>& queries,
                             const std::vector<double>& lse, float scale,
                             const std::vector<Position>& demoted) const;

 private:
  struct Page {
    std::vector<double> minima;           // [channels]
    std::vector<double> steps;            // [channels]
    std::vector<double> means;            // [head_dim], of those not chosen
    std::vector<std::vector<int>> codes;  // [position][channels]
  };
  std::vector<double> Estimates(const std::vector<float>& query, float scale,
                                const std::vector<Position>& positions) const;

  PlainRecallOptions options_;
  std::vector<std::vector<double>> squares_;  // [token][head_dim]
  std::vector<int> chosen_;                   // ascending
  std::vector<Page> pages_;
};

}  // namespace heavywater
