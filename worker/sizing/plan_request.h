// What heavywater-plan-memory is asked, as JSON:
//
//   {"model": "llama-3-8b"                    a preset, or {"gguf": PATH}, or
//             {"num_layers", "hidden_size", "num_query_heads", "num_kv_heads",
//              "head_dim", "ffn_size", "vocab_size", "tied_embeddings", "name"},
//    "world_sizes": [1, 2], "contexts": [32768],
//    "policies": [{"policy": "recall", ...}]  fields of PolicyOptions,
//    "new_tokens", "num_sequences", "kv_dtype", "page_tokens", "max_step_tokens",
//    "device_bytes"                           for the longest context that fits
//    "bandwidth_gb_s", "host_bandwidth_gb_s"} for the step's time
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/sizing/memory_plan.h"

namespace heavywater {

struct NamedPolicy {
  std::string name;  // as asked: also a preset's
  PolicyOptions options;
};

struct PlanRequest {
  Deployment common;  // but for the next three
  std::vector<int> world_sizes;
  std::vector<int64_t> contexts;
  std::vector<NamedPolicy> policies;
  int64_t device_bytes = 0;        // 0: not asked
  double bandwidth_gb_s = 0;       // 10^9 bytes a second; 0: not asked
  double host_bandwidth_gb_s = 0;  // likewise, of the bus
};

// One of `policies`. INVALID_ARGUMENT naming the field.
absl::StatusOr<NamedPolicy> ParsePolicyFields(const nlohmann::json& value);

// INVALID_ARGUMENT naming the field; what ReadModelConfig() says of a file.
absl::StatusOr<PlanRequest> ParsePlanRequest(const std::string& text);

}  // namespace heavywater
