// One rank of a model in this process: what the Python binding wraps. Everything that
// an AttentionEngine needs lives here, so that a caller holds one object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/local_host_tier.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/comm/communicator.h"
#include "worker/python/engine_group.h"
#include "worker/rank/attention_engine.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

struct LocalDeviceOptions {
  std::string device = "cpu";                    // or "cuda:N"
  int num_threads = 1;                           // of attention, the caller's included
  std::string target = "best";                   // as CpuBackendOptions
  int64_t host_memory_bytes = int64_t{4} << 30;  // for demoted positions, of all engines
};

// The device and the host memory that engines of one process share. Calls of its engines
// take turns: any thread may make them.
class LocalDevice {
 public:
  // INVALID_ARGUMENT naming the field; FAILED_PRECONDITION as CreateCpuBackend().
  static absl::StatusOr<std::shared_ptr<LocalDevice>> Create(const LocalDeviceOptions& options);

  Backend& backend() { return *backend_; }
  LocalHostTier& tier() { return tier_; }
  std::mutex& mutex() { return mutex_; }
  int64_t host_bytes();
  // -1: the CPU, whose memory is the host's.
  int gpu() const { return gpu_; }
  std::string name() const;

 private:
  LocalDevice(std::unique_ptr<Backend> backend, int gpu, int64_t host_memory_bytes);

  std::mutex mutex_;
  std::unique_ptr<Backend> backend_;
  const int gpu_;
  LocalHostTier tier_;
};

// Rows of one layer where the caller has them, float32, in the device's memory: Q, K and V are
// read in place, and attention writes `out` in place, too. On a GPU they must be there already
// (whatever streams they were computed on), and are when Attend() returns.
struct CallerRows {
  int64_t rows = 0;
  const float* queries = nullptr;  // [rows][num_query_heads][head_dim], rotated
  const float* keys = nullptr;     // [rows][num_kv_heads][head_dim], rotated
  const float* values = nullptr;   // likewise
  float* out = nullptr;            // like queries
};

// One rank's AttentionEngine: the only one, or one of a group's. Its calls, errors and order are
// that class's; sequences of all engines of a device have different ids.
class LocalEngine {
 public:
  // `group` null: one rank. Else options' rank and world_size are the group's.
  static absl::StatusOr<std::unique_ptr<LocalEngine>> Create(std::shared_ptr<LocalDevice> device,
                                                             const RankCacheOptions& options,
                                                             std::shared_ptr<EngineGroup> group);
  ~LocalEngine();

  absl::Status Open(SequenceId sequence, const SequenceOptions& options);
  // `source` of the engine `from` (of the same device; it may be this one) goes on as
  // `sequence` here, too.
  absl::Status Fork(SequenceId sequence, LocalEngine& from, SequenceId source);
  absl::Status Truncate(SequenceId sequence, int64_t tokens);
  absl::StatusOr<std::vector<std::byte>> SaveState(SequenceId sequence);
  absl::StatusOr<std::vector<std::byte>> ReadPage(SequenceId sequence, int64_t page);
  absl::Status LoadState(SequenceId sequence, const SequenceOptions& options,
                         std::span<const std::byte> state,
                         std::span<const std::span<const std::byte>> pages, int64_t tokens_seen);
  absl::Status Close(SequenceId sequence);
  absl::Status Begin(std::span<const EngineItem> items);
  // All rows of the step's layer, or of a prompt that is alone any number of them.
  // INVALID_ARGUMENT also for NaN and infinity, as far as the host can see them.
  absl::Status Attend(int layer, const CallerRows& rows);
  // The first item's error, if one failed; the others have gone on.
  absl::Status End();
  void Abandon();

  absl::StatusOr<SequenceStats> Stats(SequenceId sequence);
  absl::StatusOr<KeptSequence> Kept(SequenceId sequence);
  absl::StatusOr<std::vector<std::byte>> ReadKv(SequenceId sequence, int layer, int kv_head,
                                                Position position);
  // Slots, scores, tables, sketches and a running prompt's layer: now, and at most.
  MemoryGauge kv_bytes();
  LocalDevice& device() { return *device_; }
  const KvShape& shape() const { return cache_->options().shape; }

 private:
  LocalEngine(std::shared_ptr<LocalDevice> device, std::unique_ptr<RankCache> cache,
              std::shared_ptr<EngineGroup> group);
  absl::Status CheckRows(const CallerRows& rows) const;
  absl::Status AttendPart(int layer, const CallerRows& rows);

  std::shared_ptr<LocalDevice> device_;
  std::shared_ptr<EngineGroup> group_;                // or null
  std::vector<std::unique_ptr<Communicator>> alone_;  // of one rank, where group_ is null
  std::unique_ptr<RankCache> cache_;
  std::unique_ptr<AttentionEngine> engine_;
};

}  // namespace heavywater
