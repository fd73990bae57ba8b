#include "worker/model/rank_shard.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

// The longest block of packed rows (packed_rows.h), and two cache lines of float32.
constexpr int64_t kUnit = 32;

}  // namespace

Range SplitInUnits(int64_t total, int part, int num_parts) {
  HW_CHECK(num_parts > 0 && part >= 0 && part < num_parts);
  const int64_t units = (total + kUnit - 1) / kUnit;
  const int64_t share = units / num_parts;
  const int64_t longer = units % num_parts;  // parts with one unit more
  const int64_t first = part * share + std::min<int64_t>(part, longer);
  const int64_t count = share + (part < longer ? 1 : 0);
  const int64_t begin = std::min(first * kUnit, total);
  return {begin, std::min((first + count) * kUnit, total) - begin};
}

absl::StatusOr<RankShard> MakeRankShard(const ModelConfig& config, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(
        Message("rank is ", rank, " of ", size, ", want 0 or more and less than the size"));
  }
  if (config.num_query_heads % size != 0) {
    return absl::InvalidArgumentError(Message("the group has ", size,
                                              " ranks, want a divisor of the model's ",
                                              config.num_query_heads, " query heads"));
  }
  if (config.num_kv_heads % size != 0 && size % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        Message("the group has ", size, " ranks, want a divisor or a multiple of the model's ",
                config.num_kv_heads, " KV heads"));
  }
  const int kv_heads = std::max(config.num_kv_heads / size, 1);
  const int64_t first_kv_head = int64_t{rank} * config.num_kv_heads / size;
  const int query_heads = config.num_query_heads / size;
  return RankShard{
      .rank = rank,
      .size = size,
      .kv_heads = {first_kv_head, kv_heads},
      .query_heads = {int64_t{rank} * query_heads, query_heads},
      .ffn = SplitInUnits(config.ffn_size, rank, size),
      .vocab = SplitInUnits(config.vocab_size, rank, size),
      .max_vocab = SplitInUnits(config.vocab_size, 0, size).size,
  };
}

KvShape MakeKvShape(const ModelConfig& config, const RankShard& shard, const KvShape& defaults) {
  KvShape shape = defaults;
  shape.num_layers = config.num_layers;
  shape.num_query_heads = static_cast<int>(shard.query_heads.size);
  shape.num_kv_heads = static_cast<int>(shard.kv_heads.size);
  shape.first_kv_head = static_cast<int>(shard.kv_heads.begin);
  shape.total_kv_heads = config.num_kv_heads;
  shape.total_query_heads = config.num_query_heads;
  shape.head_dim = config.head_dim;
  return shape;
}

}  // namespace heavywater
