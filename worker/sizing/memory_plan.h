// What one deployment needs: bytes on the device of the rank that holds most, bytes
// of the host tier, and what a decode step reads.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/kv_layout.h"
#include "worker/model/model_config.h"
#include "worker/policy/policy.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {

// As ModelConfig and the worker's configuration name them.
struct Deployment {
  ModelConfig model;
  int world_size = 1;
  int64_t context_tokens = 0;  // of each sequence: prompt and new tokens
  int64_t new_tokens = 1024;   // of context_tokens, after the prompt
  int num_sequences = 1;       // at the same time, all alike
  PolicyOptions policy;
  KvDtype kv_dtype = KvDtype::kBFloat16;
  int page_tokens = 256;
  int max_step_tokens = 512;  // prompt_chunk_tokens
};

// On each device. Workspace and sequences count against device_memory_bytes of the
// worker's configuration, the rest is beside it.
struct DeviceNeed {
  int64_t weights = 0;        // in bf16
  int64_t runner = 0;         // a step's activations, cuBLAS's scratch
  int64_t workspace = 0;      // held without any sequence
  SequenceBytes sequence;     // of one
  int64_t prompt_hidden = 0;  // hidden states of the one prompt that runs
  int num_sequences = 1;

  // All sequences, one of them still in its prompt.
  int64_t sequences() const { return num_sequences * sequence.steady() + sequence.prompt; }
  int64_t configured() const { return workspace + sequences(); }
  int64_t total() const { return weights + runner + prompt_hidden + configured(); }
};

// Necessary bytes of a decode step of all sequences, on each device.
struct StepReads {
  int64_t weights = 0;
  int64_t kv = 0;        // keys and values of residents
  int64_t scores = 0;    // positions, gains and (at plans) scores, read and written
  int64_t sketches = 0;  // recall: of all pages
  int64_t host = 0;      // recall: picks, over the bus, at most

  int64_t device() const { return weights + kv + scores + sketches; }
};

struct MemoryPlan {
  DeviceNeed device;
  Budget budget;
  int64_t resident_tokens = 0;  // in slots, per layer and KV head, at the end
  // KV of one sequence on one device once its prompt is done, and what a cache that
  // keeps everything would hold there.
  int64_t kv_bytes = 0;
  int64_t full_kv_bytes = 0;
  int64_t host_bytes = 0;  // of this rank's pages in the host tier, all sequences
  StepReads step;
};

// INVALID_ARGUMENT naming the field. `scratch_sizes` of the backend that will run.
absl::StatusOr<MemoryPlan> PlanMemory(const Deployment& deployment,
                                      const ScratchSizes& scratch_sizes);

// The most context_tokens for which the total fits, with everything else as in
// `deployment`; 0 when not even one prompt token does. At most what a 32-bit
// position can count.
absl::StatusOr<int64_t> LongestContext(const Deployment& deployment,
                                       const ScratchSizes& scratch_sizes, int64_t device_bytes);

}  // namespace heavywater
