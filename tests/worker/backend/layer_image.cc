#include "tests/worker/backend/layer_image.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "worker/cache/kv_element.h"

namespace heavywater {

std::vector<float> RandomFloats(std::mt19937& rng, int64_t count, float deviation) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

std::vector<std::byte> Stored(std::span<const float> values, KvDtype dtype) {
  std::vector<std::byte> bytes(values.size() * ElementBytes(dtype));
  StoreKvRow(dtype, values, bytes.data());
  return bytes;
}

std::vector<std::byte> StoredRow(const std::vector<std::byte>& rows, const KvShape& shape,
                                 int64_t capacity, int kv_head, int64_t slot) {
  const int64_t row_bytes = int64_t{shape.head_dim} * ElementBytes(shape.dtype);
  const auto first = rows.begin() + (kv_head * capacity + slot) * row_bytes;
  return {first, first + row_bytes};
}

LayerImage EmptyLayer(const KvShape& shape, int num_sets, int64_t capacity) {
  const int64_t elements = shape.num_kv_heads * capacity * shape.head_dim;
  LayerImage layer;
  layer.keys.resize(elements * ElementBytes(shape.dtype));
  layer.values.resize(elements * ElementBytes(shape.dtype));
  layer.positions.assign(num_sets * capacity, kNoPosition);
  layer.scores.resize(num_sets * capacity);
  layer.gains.resize(shape.num_kv_heads * capacity);
  layer.num_sets = num_sets;
  layer.capacity = capacity;
  layer.used = capacity;
  return layer;
}

LayerImage DenseLayer(std::mt19937& rng, const KvShape& shape, int num_sets, int64_t capacity) {
  LayerImage layer = EmptyLayer(shape, num_sets, capacity);
  const int64_t elements = shape.num_kv_heads * capacity * shape.head_dim;
  layer.keys = Stored(RandomFloats(rng, elements), shape.dtype);
  layer.values = Stored(RandomFloats(rng, elements), shape.dtype);
  for (int set = 0; set < num_sets; ++set) {
    std::iota(layer.positions.begin() + set * capacity,
              layer.positions.begin() + (set + 1) * capacity, 0);
  }
  return layer;
}

void PunchHoles(std::mt19937& rng, const KvShape& shape, double fraction, LayerImage& layer) {
  const std::vector<std::byte> huge =
      Stored(std::vector<float>(shape.head_dim, 1e30f), shape.dtype);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const int set = layer.num_sets == 1 ? 0 : kv_head;
    for (int64_t slot = 0; slot < layer.capacity; ++slot) {
      Position& position = layer.positions[set * layer.capacity + slot];
      const bool decides = layer.num_sets > 1 || kv_head == 0;
      if (decides && std::bernoulli_distribution(fraction)(rng)) position = kNoPosition;
      if (position != kNoPosition) continue;
      const int64_t row = (kv_head * layer.capacity + slot) * static_cast<int64_t>(huge.size());
      std::copy(huge.begin(), huge.end(), layer.keys.begin() + row);
      std::copy(huge.begin(), huge.end(), layer.values.begin() + row);
    }
  }
}

void ShufflePositions(std::mt19937& rng, LayerImage& layer) {
  for (int set = 0; set < layer.num_sets; ++set) {
    const auto first = layer.positions.begin() + set * layer.capacity;
    std::shuffle(first, first + layer.used, rng);
  }
}

DeviceLayer::DeviceLayer(Backend& backend, const LayerImage& image)
    : backend_(&backend),
      keys_(Upload(backend, image.keys)),
      values_(Upload(backend, image.values)),
      positions_(Upload(backend, image.positions)),
      scores_(Upload(backend, image.scores)),
      gains_(Upload(backend, image.gains)),
      view_{.keys = keys_.As<std::byte>(),
            .values = values_.As<std::byte>(),
            .positions = positions_.As<Position>(),
            .scores = scores_.As<int64_t>(),
            .gains = gains_.As<int64_t>(),
            .num_sets = image.num_sets,
            .capacity = image.capacity,
            .used = image.used} {}

LayerImage DeviceLayer::Read() const {
  return {.keys = Download<std::byte>(*backend_, keys_),
          .values = Download<std::byte>(*backend_, values_),
          .positions = Download<Position>(*backend_, positions_),
          .scores = Download<int64_t>(*backend_, scores_),
          .gains = Download<int64_t>(*backend_, gains_),
          .num_sets = view_.num_sets,
          .capacity = view_.capacity,
          .used = view_.used};
}

}  // namespace heavywater
