// All ranks of a group that engines drive, each rank on a thread of its own; Q, K and V
// as a TestGroup of the same options has them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "tests/worker/rank/test_group.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_engine.h"

namespace heavywater {

struct EngineAppend {
  EngineItem item;
  std::vector<int32_t> tokens;  // num_tokens of them
};

class TestEngineGroup {
 public:
  explicit TestEngineGroup(const TestGroupOptions& options);

  const TestGroupOptions& options() const { return options_; }
  AttentionEngine& engine(int rank = 0) { return *ranks_[rank].engine; }
  RankCache& cache(int rank = 0) { return *ranks_[rank].cache; }

  // Every call below goes to all ranks, which must agree on the status's code;
  // returns rank 0's.
  absl::Status Everywhere(const std::function<absl::Status(int)>& call);
  absl::Status Open(SequenceId sequence, const SequenceOptions& options);
  absl::Status Close(SequenceId sequence);
  absl::Status Begin(const std::vector<EngineAppend>& appends);
  // A layer's rows of the appends, `part_rows` at a time (0: all at once).
  absl::Status Attend(int layer, const std::vector<EngineAppend>& appends, int64_t part_rows = 0);
  absl::Status End();
  // All of it, and the first error of an item.
  absl::Status Step(const std::vector<EngineAppend>& appends, int64_t part_rows = 0);

  // Sets() as TestGroup.
  std::vector<Ledger> Sets(SequenceId sequence, int layer);
  // What attention returned last, all heads of the model.
  std::vector<float> Attention(int layer, int32_t token, Position position) const;
  // This rank's rows of the tokens: q, k and v.
  SyntheticRow RowsOf(int rank, int layer, const std::vector<EngineAppend>& appends) const;

 private:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Communicator> communicator;
    std::unique_ptr<RankCache> cache;
    std::unique_ptr<AttentionEngine> engine;
    std::map<std::tuple<int, int32_t, Position>, std::vector<float>> attention;
  };

  absl::Status AttendRank(int rank, int layer, const std::vector<EngineAppend>& appends,
                          int64_t part_rows);

  const TestGroupOptions options_;
  RowSource rows_;
  std::vector<Rank> ranks_;
};

}  // namespace heavywater
