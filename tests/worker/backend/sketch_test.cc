// Backend's operations on sketches: ObserveQueries, ChooseChannels, EncodePages;
// and PromoteSlots.
#include "worker/backend/sketch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache_service/base/float16.h"
#include "tests/worker/backend/backend_test_base.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

KvShape Shape(int num_kv_heads, int head_dim, KvDtype dtype, int page_tokens) {
  KvShape shape;
  shape.num_query_heads = 2 * num_kv_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  shape.page_tokens = page_tokens;
  return shape;
}

// A layer whose keys have structure, per KV head.
LayerImage StructuredLayer(std::mt19937& rng, const KvShape& shape, int64_t num_positions) {
  LayerImage layer = DenseLayer(rng, shape, 1, num_positions);
  std::vector<float> keys;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const std::vector<float> of_head = StructuredKeys(rng, num_positions, shape.head_dim);
    keys.insert(keys.end(), of_head.begin(), of_head.end());
  }
  layer.keys = Stored(keys, shape.dtype);
  return layer;
}

// Keys as stored, [kv_head][position][head_dim].
double Key(const LayerImage& layer, const KvShape& shape, int kv_head, int64_t position, int i) {
  const int64_t index = (kv_head * layer.capacity + position) * shape.head_dim + i;
  return WithKvElement(shape.dtype, [&]<typename T>(std::type_identity<T>) {
    return double{ToFloat(reinterpret_cast<const T*>(layer.keys.data())[index])};
  });
}

struct SketchCase {
  KvShape shape;
  LayerImage layer;
  RecallImage image;
};

SketchCase RandomSketchCase(unsigned seed) {
  constexpr int kHeadDims[] = {64, 80, 96, 128, 256, 8, 24};
  constexpr int kPageTokens[] = {16, 64, 256};
  std::mt19937 rng(seed);
  SketchCase result;
  result.shape = Shape(1 + static_cast<int>(rng() % 3), kHeadDims[seed % std::size(kHeadDims)],
                       kKvDtypes[rng() % 3], kPageTokens[rng() % 3]);
  result.layer = StructuredLayer(rng, result.shape, 1 + static_cast<int64_t>(rng() % 700));
  const int channels = rng() % 3 == 0
                           ? 8 * (1 + static_cast<int>(rng() % (result.shape.head_dim / 8)))
                           : DefaultSketchChannels(result.shape.head_dim);
  result.image = RecallOf(result.shape, result.layer, channels);
  result.image.squares =
      RandomFloats(rng, result.shape.num_kv_heads * kSketchQueries * result.shape.head_dim);
  for (float& square : result.image.squares) square *= square;
  for (auto& page : result.image.host) {
    if (rng() % 5 == 0) page.clear();
  }
  return result;
}

TEST_P(BackendTest, ObserveQueriesKeepsTheSquaresOfTheLastQueries) {
  std::mt19937 rng(1);
  const KvShape shape = Shape(3, 24, KvDtype::kFloat32, 16);
  const DeviceBuffer squares = Upload(backend(), std::vector<float>(3 * kSketchQueries * 24, -1));
  std::vector<std::vector<float>> seen(200);  // [position][query heads * head_dim]
  int64_t position = 0;
  for (const int64_t tokens : {1, 5, 40, 3, 1, 33}) {
    const std::vector<float> queries = RandomFloats(rng, tokens * 6 * 24);
    for (int64_t token = 0; token < tokens; ++token) {
      const auto first = queries.begin() + token * 6 * 24;
      seen[position + token].assign(first, first + 6 * 24);
    }
    const DeviceBuffer buffer = Upload(backend(), queries);
    Stream stream;
    ASSERT_TRUE(backend()
                    .ObserveQueries(shape,
                                    {.queries = buffer.As<float>(),
                                     .num_tokens = tokens,
                                     .first_position = static_cast<Position>(position),
                                     .squares = squares.As<float>()},
                                    stream)
                    .ok());
    position += tokens;
    const std::vector<float> result = Download<float>(backend(), squares);
    for (int64_t back = 1; back <= std::min<int64_t>(position, kSketchQueries); ++back) {
      for (int i = 0; i < 3 * 24; ++i) {
        const int kv_head = i / 24;
        const float* row = seen[position - back].data();
        const float a = row[(2 * kv_head) * 24 + i % 24];
        const float b = row[(2 * kv_head + 1) * 24 + i % 24];
        const int64_t entry = kv_head * kSketchQueries + (position - back) % kSketchQueries;
        ASSERT_FLOAT_EQ(result[entry * 24 + i % 24], a * a + b * b);
      }
    }
  }
}

TEST_P(BackendTest, ChooseChannelsTakesTheLargestOfQueryEnergyTimesKeyVariance) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto [shape, layer, image] = RandomSketchCase(seed);
    const DeviceRecall recall(backend(), shape, image, 1);
    const std::vector<uint8_t> channels = recall.Channels();
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      std::vector<double> value(shape.head_dim);
      for (int i = 0; i < shape.head_dim; ++i) {
        double count = 0, sum = 0, energy = 0;
        const auto for_keys = [&](const auto& body) {
          for (int64_t position = 0; position < layer.capacity; ++position) {
            const int64_t page = kv_head * image.num_pages() + position / shape.page_tokens;
            if (!image.host[page].empty()) body(Key(layer, shape, kv_head, position, i));
          }
        };
        for_keys([&](double key) { sum += key, ++count; });
        double squares = 0;
        for_keys([&](double key) { squares += (key - sum / count) * (key - sum / count); });
        for (int query = 0; query < kSketchQueries; ++query) {
          energy += image.squares[(kv_head * kSketchQueries + query) * shape.head_dim + i];
        }
        value[i] = count == 0 ? 0 : energy * squares / count;
      }
      std::vector<int> order(shape.head_dim);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return value[a] > value[b]; });
      const double cut = value[order[image.sketch.channels - 1]];
      const auto first = channels.begin() + kv_head * image.sketch.channels;
      const std::vector<int> chosen(first, first + image.sketch.channels);
      EXPECT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
      EXPECT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
      for (int rank = 0; rank < shape.head_dim; ++rank) {
        const int channel = order[rank];
        if (std::abs(value[channel] - cut) <= 1e-5 * cut && value[channel] != 0) continue;
        EXPECT_EQ(std::binary_search(chosen.begin(), chosen.end(), channel),
                  rank < image.sketch.channels)
            << "channel " << channel;
      }
    }
  }
}

TEST_P(BackendTest, ChooseChannelsGoesByTheKeysAloneWhenNoQueryWasSeen) {
  std::mt19937 rng(1);
  const KvShape shape = Shape(1, 32, KvDtype::kFloat32, 16);
  std::vector<float> keys = RandomFloats(rng, 40 * 32);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] *= i % 4 == 3 ? 5.0f : 1.0f;
  LayerImage layer = EmptyLayer(shape, 1, 40);
  layer.keys = Stored(keys, shape.dtype);
  const RecallImage image = RecallOf(shape, layer, 8);
  const DeviceRecall recall(backend(), shape, image, 1);
  const DeviceBuffer squares = Upload(backend(), std::vector<float>(kSketchQueries * 32));
  const DeviceBuffer channels = Upload(backend(), std::vector<uint8_t>(8));
  Stream stream;
  ASSERT_TRUE(backend()
                  .ChooseChannels(shape,
                                  {.sketch = image.sketch,
                                   .host = recall.view().host,
                                   .num_positions = 40,
                                   .squares = squares.As<float>(),
                                   .num_queries = 0,
                                   .channels = channels.As<uint8_t>()},
                                  stream)
                  .ok());
  EXPECT_EQ(Download<uint8_t>(backend(), channels),
            (std::vector<uint8_t>{3, 7, 11, 15, 19, 23, 27, 31}));
}

// Of chosen channels within half a step; of the others the mean.
void ExpectDecodes(const SketchCase& sketch, int kv_head, int64_t page, const std::byte* bytes,
                   const uint8_t* chosen) {
  const auto& [shape, layer, image] = sketch;
  const SketchPage codes = SketchPageAt(image.sketch, bytes);
  const int64_t first = page * shape.page_tokens;
  const int64_t count = std::min<int64_t>(layer.capacity - first, shape.page_tokens);
  std::vector<double> mean(shape.head_dim);
  for (int64_t row = 0; row < count; ++row) {
    for (int i = 0; i < shape.head_dim; ++i) {
      mean[i] += Key(layer, shape, kv_head, first + row, i) / static_cast<double>(count);
    }
  }
  std::vector<float> key(shape.head_dim);
  for (int64_t row = 0; row < count; ++row) {
    DecodeSketchRow(image.sketch, codes, chosen, row, key.data());
    for (int i = 0; i < image.sketch.channels; ++i) {
      const double exact = Key(layer, shape, kv_head, first + row, chosen[i]);
      // The last code may fall short of the maximum by the rounding of 15 steps.
      const double slack = 0.5 * Float16ToFloat(codes.steps[i]) * 1.03 +
                           std::abs(Float16ToFloat(codes.minima[i])) / 1024;
      ASSERT_NEAR(key[chosen[i]], exact, slack) << "row " << row << " channel " << i;
    }
    ForOtherChannels(image.sketch, chosen, [&](int channel, int index) {
      ASSERT_NEAR(key[channel], mean[channel], 1e-6 + std::abs(mean[channel]) / 1000);
    });
  }
  for (int64_t row = count; row < shape.page_tokens; ++row) {
    for (int i = 0; i < image.sketch.channels; ++i) {
      ASSERT_EQ(SketchCode(image.sketch, codes, row, i), 0) << "row " << row;
    }
  }
}

TEST_P(BackendTest, SketchesDecodeToTheKeysAndEqualTheOraclesBitForBit) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const SketchCase sketch = RandomSketchCase(seed);
    const auto& [shape, layer, image] = sketch;
    const DeviceRecall recall(backend(), shape, image, 1);
    const DeviceRecall expected(oracle(), shape, image, 1);
    const std::vector<uint8_t> channels = recall.Channels();
    EXPECT_EQ(channels, expected.Channels());
    for (int64_t page = 0; page < image.num_pages(); ++page) {
      const std::vector<std::byte> bytes = recall.Page(page);
      EXPECT_EQ(bytes, expected.Page(page));
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        const std::byte* of_head = bytes.data() + kv_head * image.sketch.page_bytes();
        if (image.host[kv_head * image.num_pages() + page].empty()) {
          EXPECT_EQ(std::count(of_head, of_head + image.sketch.page_bytes(), std::byte{0}),
                    image.sketch.page_bytes())
              << "a page without a copy was written";
        } else {
          ExpectDecodes(sketch, kv_head, page, of_head,
                        channels.data() + kv_head * image.sketch.channels);
        }
      }
    }
  }
}

TEST_P(BackendTest, EncodePagesWritesThePagesAskedForOnly) {
  std::mt19937 rng(2);
  const KvShape shape = Shape(2, 64, KvDtype::kBFloat16, 16);
  const RecallImage image = RecallOf(shape, StructuredLayer(rng, shape, 16 * 5), 16);
  const DeviceRecall whole(backend(), shape, image, 1);
  std::vector<DeviceBuffer> buffers;
  std::vector<DeviceSpan<std::byte>> pages;
  for (int page = 0; page < 5; ++page) {
    buffers.push_back(backend().Allocate(2 * image.sketch.page_bytes()).value());
    pages.push_back(buffers.back().As<std::byte>());
  }
  Stream stream;
  ASSERT_TRUE(backend()
                  .EncodePages(shape,
                               {.sketch = image.sketch,
                                .host = whole.view().host,
                                .channels = whole.view().channels,
                                .pages = pages,
                                .first_page = 1,
                                .end_page = 5,
                                .num_positions = 16 * 3},
                               stream)
                  .ok());
  const std::vector<std::byte> zeros(2 * image.sketch.page_bytes());
  for (int page = 0; page < 5; ++page) {
    EXPECT_EQ(Download<std::byte>(backend(), buffers[page]),
              page == 1 || page == 2 ? whole.Page(page) : zeros)
        << "page " << page;
  }
}

TEST_P(BackendTest, ConstantZeroAndOutlierChannelsStayFinite) {
  const KvShape shape = Shape(1, 32, KvDtype::kFloat32, 16);
  LayerImage layer = EmptyLayer(shape, 1, 16);
  std::vector<float> keys(16 * 32);
  for (int row = 0; row < 16; ++row) {
    keys[row * 32 + 0] = 7;                                // constant
    keys[row * 32 + 1] = row == 5 ? 1e30f : 0;             // beyond fp16
    keys[row * 32 + 2] = row == 5 ? -1e30f : 1e30f;        // both ways
    keys[row * 32 + 3] = static_cast<float>(row) * 1e-9f;  // below fp16
    keys[row * 32 + 4] = static_cast<float>(row);
  }
  layer.keys = Stored(keys, shape.dtype);
  const RecallImage image = RecallOf(shape, layer, 32);
  const DeviceRecall recall(backend(), shape, image, 1);
  const std::vector<std::byte> page = recall.Page(0);
  const std::vector<uint8_t> channels = recall.Channels();
  std::vector<float> key(32);
  for (int row = 0; row < 16; ++row) {
    DecodeSketchRow(image.sketch, SketchPageAt(image.sketch, page.data()), channels.data(), row,
                    key.data());
    for (const float value : key) EXPECT_TRUE(std::isfinite(value));
    EXPECT_EQ(key[0], 7);
    EXPECT_NEAR(key[1], row == 5 ? kMaxFloat16 : 0, 100);
    EXPECT_NEAR(key[2], row == 5 ? -kMaxFloat16 : kMaxFloat16, 100);
    EXPECT_NEAR(key[3], 0, 2e-8);
    EXPECT_EQ(key[4], row);
  }
}

TEST_P(BackendTest, AShapeThatHasNoSketchIsInvalid) {
  const KvShape shape = Shape(1, 64, KvDtype::kFloat32, 16);
  Stream stream;
  EncodePagesParams params;
  params.sketch = {.head_dim = 64, .channels = 12, .page_tokens = 16};
  const absl::Status status = backend().EncodePages(shape, params, stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("sketch_channels is 12"), std::string::npos) << status;
}

TEST_P(BackendTest, PromotedSlotsHoldTheHostsRowsTheScoresGivenAndNoGains) {
  for (const int num_sets : {1, 2}) {
    for (const KvDtype dtype : kKvDtypes) {
      std::mt19937 rng(num_sets);
      const KvShape shape = Shape(2, 64, dtype, 16);
      const LayerImage full = DenseLayer(rng, shape, num_sets, 40);
      const RecallImage image = RecallOf(shape, full, 16);
      const DeviceRecall recall(backend(), shape, image, 1);
      LayerImage expected = DenseLayer(rng, shape, num_sets, 10);
      std::fill(expected.scores.begin(), expected.scores.end(), 7);
      std::fill(expected.gains.begin(), expected.gains.end(), 9);
      const DeviceLayer layer(backend(), expected);
      const std::vector<int32_t> slots = {9, 0, 4};
      const std::vector<Position> positions = {39, 2, 16};
      const std::vector<int64_t> scores = {100, 200, 300};
      const int set = num_sets - 1;
      Stream stream;
      ASSERT_TRUE(backend()
                      .PromoteSlots(shape, layer.view(),
                                    {.set = set,
                                     .slots = slots,
                                     .positions = positions,
                                     .scores = scores,
                                     .host = recall.view().host},
                                    stream)
                      .ok());
      for (int i = 0; i < 3; ++i) {
        expected.positions[set * 10 + slots[i]] = positions[i];
        expected.scores[set * 10 + slots[i]] = scores[i];
        for (int kv_head = 0; kv_head < 2; ++kv_head) {
          if (num_sets == 2 && kv_head != set) continue;
          expected.gains[kv_head * 10 + slots[i]] = 0;
          const auto key = StoredRow(full.keys, shape, 40, kv_head, positions[i]);
          const auto value = StoredRow(full.values, shape, 40, kv_head, positions[i]);
          const int64_t row = (kv_head * 10 + slots[i]) * static_cast<int64_t>(key.size());
          std::copy(key.begin(), key.end(), expected.keys.begin() + row);
          std::copy(value.begin(), value.end(), expected.values.begin() + row);
        }
      }
      EXPECT_EQ(layer.Read(), expected);
    }
  }
}

TEST_P(BackendTest, APromotedPositionWithoutACopyIsDataLoss) {
  std::mt19937 rng(1);
  const KvShape shape = Shape(1, 64, KvDtype::kFloat32, 16);
  RecallImage image = RecallOf(shape, DenseLayer(rng, shape, 1, 40), 16);
  image.host[1].clear();
  const DeviceRecall recall(backend(), shape, image, 1);
  const LayerImage before = DenseLayer(rng, shape, 1, 4);
  const DeviceLayer layer(backend(), before);
  const std::vector<int32_t> slots = {2};
  const std::vector<Position> positions = {20};
  const std::vector<int64_t> scores = {1};
  Stream stream;
  const absl::Status status = backend().PromoteSlots(shape, layer.view(),
                                                     {.set = 0,
                                                      .slots = slots,
                                                      .positions = positions,
                                                      .scores = scores,
                                                      .host = recall.view().host},
                                                     stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("position 20"), std::string::npos) << status;
  EXPECT_EQ(layer.Read(), before);
}

}  // namespace
}  // namespace heavywater
