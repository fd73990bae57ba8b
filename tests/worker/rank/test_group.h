// All ranks of a group on one thread, cut at the collectives; the reduce is
// summed by hand, and a test can tamper with what a rank contributes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/tier/host_tier.h"
#include "tests/worker/rank/host_model.h"
#include "tests/worker/rank/plain_reference.h"
#include "tests/worker/rank/synthetic_model.h"
#include "worker/backend/backend.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/prompt_pass.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

struct TestGroupOptions {
  int world_size = 1;
  int num_layers = 2;
  int query_heads = 4;  // of the model
  int kv_heads = 2;
  int head_dim = 8;
  KvDtype dtype = KvDtype::kFloat32;
  int page_tokens = 16;
  int max_step_tokens = 64;
  int64_t reserve_ahead_tokens = 32;
  int64_t device_memory_bytes = 0;
  uint64_t seed = 1;
  RowSource rows = {};  // of Q, K and V; none: made from the seed
  // Positions::kCacheRelative, of all sequences: rows follow from the token alone.
  std::vector<double> rope_frequencies = {};
  int64_t trained_tokens = 0;
  bool cpu_backend = false;  // or the reference
  // Or these; their memory need not be the host's.
  std::function<std::unique_ptr<Backend>()> make_backend = nullptr;
  std::vector<HostTier*> tiers = {};  // one for each rank, or none
  bool rest_pages = false;
  absl::Duration max_recall_wait = absl::Seconds(5);
};

// One token of each of some sequences, or more.
struct TestAppend {
  SequenceId sequence = 0;
  std::vector<int32_t> tokens;
};

class TestGroup {
 public:
  explicit TestGroup(const TestGroupOptions& options);

  int world_size() const { return options_.world_size; }
  const TestGroupOptions& options() const { return options_; }
  RankCache& cache(int rank = 0) { return *ranks_[rank].cache; }
  SyntheticModel& model(int rank = 0) { return *ranks_[rank].model; }
  DecodeStep& step(int rank = 0) { return *ranks_[rank].step; }

  // Every call below goes to all ranks, which must agree on the status's code;
  // returns rank 0's.
  absl::Status Open(SequenceId sequence, const SequenceOptions& options);
  absl::Status Close(SequenceId sequence);
  absl::Status RunPrompt(SequenceId sequence, const std::vector<int32_t>& tokens);
  absl::Status OpenAndRunPrompt(SequenceId sequence, const SequenceOptions& options,
                                const std::vector<int32_t>& tokens);
  absl::Status RunStep(const StepDescriptor& descriptor);
  // A step as rank 0 would write it: positions and plans from its cache. The
  // first error of step and items.
  absl::Status Append(const std::vector<TestAppend>& appends);
  StepDescriptor Describe(const std::vector<TestAppend>& appends);

  // Of each rank, where the last call ended.
  const std::vector<absl::Status>& statuses() const { return statuses_; }

  // Called between Before() and the sum, with every rank's buffer.
  std::function<void(std::vector<DeviceSpan<int64_t>>&)> tamper;

  // The residents of a layer with their scores: one set for scope `layer` (equal
  // on all ranks, which is checked), one per KV head of the model otherwise.
  std::vector<Ledger> Sets(SequenceId sequence, int layer);
  // What attention returned, all heads of the model.
  std::vector<float> Attention(int layer, int32_t token, Position position);
  // Q, K and V of tokens from `first` on, as one rank without parallelism has them.
  SyntheticRow Rows(int layer, const std::vector<int32_t>& tokens, Position first) const;
  PlainShape plain_shape() const;
  bool by_places() const { return !options_.rope_frequencies.empty(); }

 private:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<RankCache> cache;
    std::unique_ptr<SyntheticModel> model;
    std::unique_ptr<HostModel> on_device;  // of `model`, where the backend is a device's
    std::unique_ptr<DecodeStep> step;

    Model& stepped() { return on_device ? static_cast<Model&>(*on_device) : *model; }
  };

  absl::Status Everywhere(const std::function<absl::Status(int)>& call);
  absl::Status Sum(const std::function<DeviceSpan<int64_t>(int)>& buffer);

  const TestGroupOptions options_;
  RowSource rows_;
  std::vector<Rank> ranks_;
  uint64_t next_step_ = 0;
  std::vector<absl::Status> statuses_;
};

// Of RoPE with base 100: far places differ in every pair of so small a head.
std::vector<double> TestRopeFrequencies(int head_dim);
// This rank's share of the model.
KvShape TestShape(const TestGroupOptions& options, int rank);
// Budget in tokens; max_tokens leaves room for `more_tokens`.
SequenceOptions TestSequence(Policy policy, Scope scope, int64_t heavy, int64_t recent,
                             int64_t prompt_tokens, int64_t more_tokens = 256);
// Distinct tokens, another range for each `tag`.
std::vector<int32_t> TestTokens(int tag, int64_t count, int64_t first = 0);

}  // namespace heavywater
