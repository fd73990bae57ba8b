// Several ranks, their host tiers and faults on one thread, from a seed.
// Sequences of all policies join, take single and multi-token appends in ragged
// batches, and leave; host memory fills up or goes away, ranks report errors or
// lose their scores. After every step everything is checked.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/worker/rank/flaky_host_tier.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {

// What has happened, so that a test can tell that it happened at all.
struct SimulationCounts {
  int64_t steps = 0;
  int64_t joined = 0;
  int64_t refused = 0;  // at open
  int64_t tokens = 0;
  int64_t failed_items = 0;  // by faults
  int64_t host_full_stops = 0;
  int64_t lost = 0;          // pages of one sequence on one rank
  int64_t demoted_rows = 0;  // compared with what was appended
  int64_t recalled = 0;      // positions that queries picked
  int64_t promoted = 0;
  int64_t dropped = 0;  // positions, summed over checks
  void Add(const SimulationCounts& other);
};

class RankSimulation {
 public:
  explicit RankSimulation(uint32_t seed);

  // "" or what is wrong.
  std::string Run(int steps);
  const SimulationCounts& counts() const { return counts_; }

 private:
  struct Sequence {
    SequenceOptions options;
    int tag = 0;
    std::unique_ptr<PlainSequence> plain;
    bool planned = true;  // the last append ended with a plan
  };
  enum class Fault { kNone, kStatus, kZeroScores };

  int Between(int low, int high) { return low + static_cast<int>(random_() % (high - low + 1)); }
  bool OneIn(int n) { return random_() % n == 0; }
  TestGroupOptions RandomGroup();
  SequenceOptions RandomSequence();
  void AddRecall(PolicyOptions& policy);
  PlainHostMemory HostMemoryOf(SequenceId id);

  std::string OneRound();
  std::string Join();
  std::string Leave();
  void ChangeHostMemory();
  void LoseOne();
  std::string Step();
  std::string ApplyItem(const StepItem& item, const std::vector<int32_t>& tokens,
                        const absl::Status& status, Fault fault);

  std::string CheckAll();
  std::string CheckSequence(SequenceId id, const Sequence& sequence);
  std::string CheckRank(int rank, SequenceId id, const Sequence& sequence);
  std::string CheckSet(int rank, SequenceId id, const Sequence& sequence, const PlanReport& report,
                       const ResidentSet& set);
  std::string CheckHostRow(int rank, SequenceId id, const Sequence& sequence, int layer,
                           int kv_head, Position position);
  std::string CheckMemory();
  std::string CheckEmpty();

  std::mt19937 random_;
  std::vector<FlakyHostTier> tiers_;
  std::unique_ptr<TestGroup> group_;
  std::vector<int64_t> idle_bytes_;  // [rank] reserved without sequences
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_id_ = 1;
  SimulationCounts counts_;
};

}  // namespace heavywater
