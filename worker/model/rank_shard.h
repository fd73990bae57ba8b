// Which part of a model a tensor-parallel rank holds.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/cache/kv_layout.h"
#include "worker/model/model_config.h"

namespace heavywater {

struct Range {
  int64_t begin = 0;
  int64_t size = 0;
};

// Part `part` of [0, total), cut in units of 32: the first parts are at most
// one unit longer than the last ones.
Range SplitInUnits(int64_t total, int part, int num_parts);

struct RankShard {
  int rank = 0;
  int size = 1;
  Range kv_heads;         // with more ranks than KV heads, several ranks have the same one
  Range query_heads;      // of those that read kv_heads, this rank's
  Range ffn;              // columns of the feed-forward's inner vector
  Range vocab;            // rows of embedding and logits
  int64_t max_vocab = 0;  // the longest vocab range of any rank
};

// INVALID_ARGUMENT unless `size` divides the query heads, and one of `size` and the KV
// heads divides the other.
absl::StatusOr<RankShard> MakeRankShard(const ModelConfig& config, int rank, int size);

// The rank's cache shape; dtype and page size as in `defaults`.
KvShape MakeKvShape(const ModelConfig& config, const RankShard& shard, const KvShape& defaults);

}  // namespace heavywater
