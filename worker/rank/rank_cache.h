// The bounded KV cache of one rank: its sequences, its device memory, its host
// pages. Prompts and steps fill and read it (AttentionEngine;
// around a model PromptPass and DecodeStep).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/host_tier.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/policy.h"
#include "worker/rank/eviction_ages.h"
#include "worker/rank/plan_report.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

class SequenceCache;
struct SequenceSnapshot;
class Workspace;

struct RankCacheOptions {
  KvShape shape;
  int rank = 0;
  int world_size = 1;
  int hidden_size = 0;              // of the model whose rows the workspace holds; 0: none,
  int vocab_size = 0;               // an engine brings Q, K and V; likewise, of its logits
  bool brings_rows = false;         // an engine whose rows are on the device: none are held for it
  int64_t device_memory_bytes = 0;  // 0: no limit
  int max_step_tokens = 512;        // workspace for so many rows is held from the start
  int64_t reserve_ahead_tokens = 1024;  // host pages reserved ahead of the newest token
  // Recall lets cold host pages rest where the tier asks for it (HostTier::BytesToRest()); alike
  // on all ranks, and only on backends that can (Backend::CanRest()).
  bool rest_pages = false;
  // How long a step waits for resting pages at most (RecallOptions::wait), and then its plans, all
  // its sequences together: well below the time that the other ranks wait for this one.
  absl::Duration max_recall_wait = absl::Seconds(5);
  float attention_scale = 0;  // of the logits; 0: 1 / sqrt(head_dim)
  // Of the model's RoPE, [head_dim / 2] radians a place: who has it may open sequences at
  // Positions::kCacheRelative. Their Q and K then come unrotated. Empty: none may.
  std::vector<double> rope_frequencies = {};
  int64_t trained_tokens = 0;  // places that the model was trained for; 0: any number

  // Ranks that hold the same KV heads (more ranks than KV heads); 1 as a rule.
  int ranks_per_kv_head() const { return shape.num_kv_heads * world_size / shape.total_kv_heads; }
};

// One thread (the rank's step). Every rank of a group makes the same calls in
// the same order.
class RankCache {
 public:
  // `backend` and `tier` outlive the cache. `tier` null: evicted positions are
  // dropped. INVALID_ARGUMENT naming the field; RESOURCE_EXHAUSTED when the
  // workspace alone does not fit.
  static absl::StatusOr<std::unique_ptr<RankCache>> Create(const RankCacheOptions& options,
                                                           Backend& backend, HostTier* tier);
  ~RankCache();

  // Admits a sequence: all of its device memory is reserved, its host pages
  // for the prompt too. ALREADY_EXISTS; INVALID_ARGUMENT naming the field;
  // RESOURCE_EXHAUSTED naming need, limit, what is in use and the longest prompt
  // that fits; UNAVAILABLE when the host tier cannot be reached.
  absl::Status Open(SequenceId sequence, const SequenceOptions& options);
  // Likewise, in the state of a snapshot, as SequenceCache::Restore() says; on an error
  // the sequence is closed again.
  absl::Status Restore(SequenceId sequence, SequenceOptions options,
                       const SequenceSnapshot& snapshot, int64_t known_tokens);
  // Opens `sequence` in the state of `source`, between its steps and after its prompt: both
  // go on from there. `from` may be this cache, or one on the same backend and of the same
  // shape. As Open(); NOT_FOUND; FAILED_PRECONDITION, INVALID_ARGUMENT; DATA_LOSS when its
  // host pages cannot be read.
  absl::Status Fork(SequenceId sequence, RankCache& from, SequenceId source);
  // Opens it in a state that SequenceCache::SaveState() wrote when it had seen `tokens_seen`.
  // As Open(); DATA_LOSS as SequenceCache::LoadState(); INVALID_ARGUMENT naming the field.
  absl::Status LoadState(SequenceId sequence, SequenceOptions options,
                         std::span<const std::byte> state,
                         std::span<const std::span<const std::byte>> pages, int64_t tokens_seen);
  // NOT_FOUND. Frees device memory; host pages live on until their lease ends.
  absl::Status Close(SequenceId sequence);

  // Device bytes that Open() would reserve, and the longest prompt for which
  // that fits now (0: none), with the same number of tokens after it.
  absl::StatusOr<int64_t> DeviceBytesNeeded(const SequenceOptions& options) const;
  int64_t LongestPromptThatFits(const SequenceOptions& options) const;

  // Whether a plan is due once `num_tokens` more are appended: rank 0 asks when
  // it writes the descriptor. False for unknown sequences.
  bool PlanDue(SequenceId sequence, int64_t num_tokens) const;
  absl::StatusOr<SequenceStats> Stats(SequenceId sequence) const;
  // The state after the last step. With `with_sets` it reads scores from the
  // device. NOT_FOUND; FAILED_PRECONDITION before the prompt's end.
  absl::StatusOr<PlanReport> Report(SequenceId sequence, bool with_sets);
  // K and then V of one resident position as stored, for tests and dumps.
  // NOT_FOUND when it is not resident. `kv_head` counts over this rank's heads.
  absl::StatusOr<std::vector<std::byte>> ReadResident(SequenceId sequence, int layer, int kv_head,
                                                      Position position);

  // Likewise of any seen position: resident, or demoted and in host memory, bit for
  // bit. INVALID_ARGUMENT naming the field; OUT_OF_RANGE for a position not seen;
  // NOT_FOUND for one that was dropped; FAILED_PRECONDITION before the prompt's end.
  absl::StatusOr<std::vector<std::byte>> ReadKv(SequenceId sequence, int layer, int kv_head,
                                                Position position);

  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  std::vector<SequenceId> sequence_ids() const;
  const DeviceMemory& memory() const { return memory_; }
  const RankCacheOptions& options() const { return options_; }

  // For what runs prompts and steps.
  absl::StatusOr<SequenceCache*> Find(SequenceId sequence) const;  // NOT_FOUND
  DeviceMemory& mutable_memory() { return memory_; }
  Backend& backend() { return backend_; }
  // The rank's one queue: all work of its steps, the model's and collectives included.
  Stream& stream() { return stream_; }
  Workspace& workspace() { return *workspace_; }
  // Of all positions that plans have taken out of slots, a set's each.
  EvictionAges& eviction_ages() { return eviction_ages_; }
  const EvictionAges& eviction_ages() const { return eviction_ages_; }
  float attention_scale() const;

 private:
  RankCache(const RankCacheOptions& options, Backend& backend, HostTier* tier);

  const RankCacheOptions options_;
  Backend& backend_;
  HostTier* const tier_;
  Stream stream_;
  DeviceMemory memory_;
  std::unique_ptr<Workspace> workspace_;
  EvictionAges eviction_ages_;
  std::map<SequenceId, std::unique_ptr<SequenceCache>> sequences_;
};

}  // namespace heavywater
