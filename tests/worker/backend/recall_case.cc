#include "tests/worker/backend/recall_case.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace heavywater {
namespace {

std::vector<float> KeysOfLayer(std::mt19937& rng, const KvShape& shape, int64_t positions) {
  std::vector<float> keys;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const std::vector<float> of_head = StructuredKeys(rng, positions, shape.head_dim);
    keys.insert(keys.end(), of_head.begin(), of_head.end());
  }
  return keys;
}

}  // namespace

KvShape RecallShape(int num_query_heads, int num_kv_heads, int head_dim, KvDtype dtype,
                    int page_tokens) {
  KvShape shape;
  shape.num_query_heads = num_query_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  shape.page_tokens = page_tokens;
  return shape;
}

KvShape RandomRecallShape(std::mt19937& rng, int group_size) {
  constexpr int kHeadDims[] = {64, 80, 96, 128, 256};
  constexpr int kPageTokens[] = {16, 64, 256};
  const int kv_heads = 1 + static_cast<int>(rng() % 3);
  return RecallShape(kv_heads * group_size, kv_heads, kHeadDims[rng() % std::size(kHeadDims)],
                     kKvDtypes[rng() % 3], kPageTokens[rng() % 3]);
}

AttendCase::Item Demoted(std::mt19937& rng, const KvShape& shape, int num_sets,
                         int64_t num_positions, int64_t num_tokens, double fraction) {
  LayerImage full = DenseLayer(rng, shape, num_sets, num_positions);
  full.keys = Stored(KeysOfLayer(rng, shape, num_positions), shape.dtype);
  AttendCase::Item item{.layer = full, .num_tokens = num_tokens};
  item.first_position = static_cast<Position>(num_positions - num_tokens);
  item.recall = RecallOf(shape, full, DefaultSketchChannels(shape.head_dim));
  const std::vector<std::byte> huge =
      Stored(std::vector<float>(shape.head_dim, 1e30f), shape.dtype);
  for (int set = 0; set < num_sets; ++set) {
    for (Position position = 0; position < item.first_position; ++position) {
      if (!std::bernoulli_distribution(fraction)(rng)) continue;
      SetDemoted(*item.recall, set, position, true);
      item.layer.positions[set * num_positions + position] = kNoPosition;
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        if (num_sets > 1 && kv_head != set) continue;
        const int64_t row =
            (kv_head * num_positions + position) * static_cast<int64_t>(huge.size());
        std::copy(huge.begin(), huge.end(), item.layer.keys.begin() + row);
        std::copy(huge.begin(), huge.end(), item.layer.values.begin() + row);
      }
    }
  }
  return item;
}

namespace {

AttendCase::Item RandomItem(std::mt19937& rng, const KvShape& shape) {
  constexpr int64_t kLengths[] = {2, 17, 64, 65, 200, 256, 257, 600};
  constexpr double kFractions[] = {0.0, 0.2, 0.8, 1.0};
  constexpr int64_t kMaxPicks[] = {1, 5, 64, 1000};
  constexpr float kMinShares[] = {1e-4f, 1e-2f, 0.0f};
  const int num_sets = rng() % 2 == 0 ? 1 : shape.num_kv_heads;
  const int64_t tokens = rng() % 3 == 0 ? 1 + static_cast<int64_t>(rng() % 5) : 1;
  AttendCase::Item item =
      Demoted(rng, shape, num_sets, kLengths[rng() % std::size(kLengths)] + tokens, tokens,
              kFractions[rng() % std::size(kFractions)]);
  RecallImage& recall = *item.recall;
  recall.max_picks = kMaxPicks[rng() % std::size(kMaxPicks)];
  recall.min_share = kMinShares[rng() % std::size(kMinShares)];
  if (rng() % 3 == 0) recall.sketch.channels = 8 * (1 + static_cast<int>(rng() % 4));
  if (rng() % 3 == 0) recall.host[rng() % recall.host.size()].clear();
  if (rng() % 4 == 0) {  // dropped: neither resident nor demoted
    for (int i = 0; i < 10; ++i) {
      SetDemoted(recall, static_cast<int>(rng() % num_sets),
                 static_cast<Position>(rng() % recall.num_positions), false);
    }
  }
  return item;
}

}  // namespace

AttendCase RandomRecallCase(std::mt19937& rng, const KvShape& shape, int num_items) {
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0};
  for (int i = 0; i < num_items; ++i) attend.items.push_back(RandomItem(rng, shape));
  attend.queries = RandomFloats(rng, attend.num_tokens() * shape.num_query_heads * shape.head_dim);
  attend.scale = static_cast<float>(1 / std::sqrt(shape.head_dim));
  return attend;
}

AttendCase OneItem(std::mt19937& rng, const KvShape& shape, AttendCase::Item item) {
  AttendCase attend{.shape = shape, .items = {std::move(item)}, .queries = {}, .scale = 0};
  attend.queries = RandomFloats(rng, attend.num_tokens() * shape.num_query_heads * shape.head_dim);
  attend.scale = static_cast<float>(1 / std::sqrt(shape.head_dim));
  return attend;
}

}  // namespace heavywater
