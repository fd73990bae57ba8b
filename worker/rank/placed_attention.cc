#include "worker/rank/placed_attention.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/rank/cache_places.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

bool IsPlaced(const ActiveItem& item) {
  return item.status.ok() && item.sequence->places() != nullptr;
}

// Query i of an item has the place of its own token: after all that was there before.
void FillQueryPlaces(int layer, const ActiveItem& item, std::vector<int32_t>& places) {
  const int64_t before = item.sequence->table(layer, 0).resident() - item.spec.num_tokens;
  const auto first = places.begin() + item.first_row;
  std::iota(first, first + item.spec.num_tokens, static_cast<int32_t>(before));
}

absl::Status TurnKeys(RankCache& cache, const LayerStorage& storage, const CachePlaces& places,
                      DeviceSpan<std::byte> to, LayerView& layer) {
  RotateKeysParams params;
  params.layer = layer;
  const std::vector<int32_t> of_slots = PlacesOfSlots(storage);
  params.places = of_slots;
  params.angles = places.angles();
  params.to = to;
  layer.keys = to;
  return cache.backend().RotateKeys(cache.options().shape, params, cache.stream());
}

}  // namespace

absl::StatusOr<DeviceSpan<const float>> TurnToPlaces(RankCache& cache, int layer,
                                                     std::span<const ActiveItem> items,
                                                     std::span<AttendItem> attends,
                                                     const AttentionRows& rows) {
  if (std::none_of(items.begin(), items.end(), IsPlaced)) return rows.queries;
  const KvShape& shape = cache.options().shape;
  const int64_t width = int64_t{shape.num_query_heads} * shape.head_dim;
  const int64_t num_rows = rows.queries.size() / width;
  std::vector<int32_t> query_places(num_rows, kNoPlace);
  DeviceSpan<const float> angles;
  int64_t key_bytes = 0;
  for (const ActiveItem& item : items) {
    if (!IsPlaced(item)) continue;
    FillQueryPlaces(layer, item, query_places);
    key_bytes += item.sequence->View(layer).keys.size();
    const DeviceSpan<const float> own = item.sequence->places()->angles();
    if (own.size() > angles.size()) angles = own;
  }
  HW_ASSIGN_OR_RETURN(DeviceSpan<std::byte> keys, cache.workspace().TurnedKeys(key_bytes));
  auto attend = attends.begin();
  for (const ActiveItem& item : items) {
    if (IsPlaced(item)) {
      const int64_t bytes = attend->layer.keys.size();
      HW_RETURN_IF_ERROR(TurnKeys(cache, item.sequence->storage(layer), *item.sequence->places(),
                                  keys.Sub(0, bytes), attend->layer));
      keys = keys.Sub(bytes, keys.size() - bytes);
    }
    if (item.status.ok()) ++attend;
  }
  HW_ASSIGN_OR_RETURN(const DeviceSpan<float> turned, cache.workspace().TurnedQueries(num_rows));
  const RotateQueriesParams params = {
      .from = rows.queries, .to = turned, .places = query_places, .angles = angles};
  HW_RETURN_IF_ERROR(cache.backend().RotateQueries(shape, params, cache.stream()));
  return DeviceSpan<const float>(turned);
}

}  // namespace heavywater
