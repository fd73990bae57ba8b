// Runs a Model over a full cache with plain attention: all that a test needs to
// get logits out of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/kv_layout.h"
#include "worker/rank/model.h"

namespace heavywater {

// One rank's part of one sequence. With several ranks, each on its own thread.
class FullCacheDecoder {
 public:
  FullCacheDecoder(Model& model, const KvShape& shape, Backend& backend);

  // Feeds the next tokens of the text; logits [tokens][vocab] of each, or of the
  // last one alone.
  absl::StatusOr<std::vector<float>> Feed(std::span<const int32_t> tokens, bool last_only);

 private:
  struct LayerCache {
    std::vector<float> keys;    // [position][kv head][head_dim]
    std::vector<float> values;  // likewise
  };

  // Rows at positions from `first` on attend to all up to their own.
  std::vector<float> Attend(const LayerCache& cache, std::span<const float> queries,
                            int64_t first) const;

  Model& model_;
  const KvShape shape_;
  Backend& backend_;
  Stream stream_;
  std::vector<LayerCache> layers_;
  int64_t num_positions_ = 0;
};

}  // namespace heavywater
