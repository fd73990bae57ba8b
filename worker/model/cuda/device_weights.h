// A rank's weights in a GPU's memory.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/model/cuda/runner_bytes.h"
#include "worker/model/llama_weights.h"
#include "worker/model/model_file.h"

namespace heavywater {

// Reads matrix by matrix through host memory of the largest one, rounds to the type
// (to nearest, ties to even) and copies; done when it returns. Errors as
// ReadLlamaWeights() and the backend's.
absl::StatusOr<LlamaWeights> LoadDeviceWeights(const ModelFile& file, const ModelConfig& config,
                                               const RankShard& shard, WeightType type,
                                               Backend& backend, Stream& stream);

}  // namespace heavywater
