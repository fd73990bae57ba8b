// What the demoted positions of one layer have received: host memory, beside
// their pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"

namespace heavywater {

// A position and what it has received, 2^-32 fixed point.
struct PositionGain {
  Position position = 0;
  int64_t gain = 0;
  bool operator==(const PositionGain&) const = default;
};

// What a ledger holds at a plan, for a sequence that goes on elsewhere.
struct LedgerSnapshot {
  // [num_sets][stride]; empty: taken from another rank's.
  int64_t stride = 0;
  std::vector<int64_t> scores;
  std::vector<int64_t> clocks;
  struct Gain {
    int head = 0;
    PositionGain gain;
  };
  std::vector<Gain> unreported;  // those above 0
};

// Scores by set, which all ranks hold alike; gains by KV head of this rank, of
// which a plan learns only what the head reports. Only demoted positions have
// either.
class DemotedLedger {
 public:
  DemotedLedger(int num_sets, int num_heads) : num_sets_(num_sets), num_heads_(num_heads) {}

  // Room for positions below `tokens`. Only after MergeGains() or at first.
  void Grow(int64_t tokens);
  int64_t stride() const { return stride_; }

  // Picks add here until the next plan: [num_heads][stride()].
  std::span<int64_t> fresh_gains() { return fresh_; }
  std::span<const int64_t> fresh_gains() const { return fresh_; }
  int64_t FreshMass(int head) const;
  // A failed step: gains since the last plan are lost, as the residents' are.
  void ForgetFreshGains();

  // The `count` largest unreported gains of a head, in ascending order of
  // position; ties to the lower one.
  std::vector<PositionGain> LargestGains(int head, int64_t count) const;
  // What LargestGains() returned has been reported.
  void ClearGain(int head, Position position);
  // Fresh gains become unreported ones.
  void MergeGains();

  // Fresh gains are none at a plan, and not saved.
  LedgerSnapshot Save(bool with_scores) const;
  // After Grow(). DATA_LOSS for what does not fit.
  absl::Status Load(const LedgerSnapshot& snapshot);

  // `clock`: queries for which scores have decayed so far.
  void SetScore(int set, Position position, int64_t score, int64_t clock);
  int64_t ScoreAt(int set, Position position, double decay, int64_t clock) const;

 private:
  struct Score {
    int64_t score = 0;
    int64_t clock = 0;
  };

  int num_sets_;
  int num_heads_;
  int64_t stride_ = 0;
  std::vector<Score> scores_;        // [num_sets][stride]
  std::vector<int64_t> unreported_;  // [num_heads][stride], as of the last plan
  std::vector<int64_t> fresh_;       // [num_heads][stride], since then
};

}  // namespace heavywater
