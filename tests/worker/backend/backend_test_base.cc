#include "tests/worker/backend/backend_test_base.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "tests/worker/backend/backend_factory.h"

namespace heavywater {

void BackendTest::SetUp() {
  auto backend = CreateTestBackend(GetParam());
  if (absl::IsFailedPrecondition(backend.status())) GTEST_SKIP() << backend.status();
  ASSERT_TRUE(backend.ok()) << backend.status();
  // A CUDA backend on the host shim has one name, whatever the order of its threads.
  ASSERT_EQ(GetParam().find((*backend)->Name()), 0u);
  backend_ = std::move(*backend);
}

void BackendTest::TearDown() {
  backend_ = nullptr;
  EXPECT_EQ(TestBackendComplaint(), "");
}

INSTANTIATE_TEST_SUITE_P(All, BackendTest, testing::ValuesIn(TestBackendNames()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

int64_t AttendCase::num_tokens() const {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const Item& item) { return sum + item.num_tokens; });
}

AttendCase AttendCase::Alone(size_t item) const {
  const int64_t row = int64_t{shape.num_query_heads} * shape.head_dim;
  int64_t first = 0;
  for (size_t i = 0; i < item; ++i) first += items[i].num_tokens * row;
  return {
      .shape = shape,
      .items = {items[item]},
      .queries = {queries.begin() + first, queries.begin() + first + items[item].num_tokens * row},
      .scale = scale};
}

DeviceBuffer AttendScratch(Backend& backend, const KvShape& shape,
                           std::span<const AttendItem> items) {
  int64_t capacity = 0;
  RecallLimits recall;
  for (const AttendItem& item : items) {
    capacity = std::max(capacity, item.layer.capacity);
    if (item.recall != nullptr) recall.Raise(LimitsOf(*item.recall));
  }
  return *backend.Allocate(backend.AttendScratchBytes(shape, capacity, recall));
}

AttendOutcome RunAttend(Backend& backend, const AttendCase& attend) {
  std::vector<DeviceLayer> layers;
  std::vector<std::unique_ptr<DeviceRecall>> recalls;
  std::vector<AttendItem> items;
  int64_t first_token = 0;
  for (const AttendCase::Item& item : attend.items) {
    layers.emplace_back(backend, item.layer);
    recalls.push_back(item.recall ? std::make_unique<DeviceRecall>(backend, attend.shape,
                                                                   *item.recall, item.num_tokens)
                                  : nullptr);
    items.push_back({.layer = layers.back().view(),
                     .first_token = first_token,
                     .num_tokens = item.num_tokens,
                     .first_position = item.first_position,
                     .accumulate_gains = true,
                     .gains = attend.gains,
                     .recall = recalls.back() ? &recalls.back()->view() : nullptr});
    first_token += item.num_tokens;
  }
  const DeviceBuffer queries = Upload(backend, attend.queries);
  const DeviceBuffer out = Upload(backend, std::vector<float>(attend.queries.size(), NAN));
  const DeviceBuffer scratch = AttendScratch(backend, attend.shape, items);
  Stream stream;
  const absl::Status status = backend.Attend(attend.shape,
                                             {.items = items,
                                              .queries = queries.As<float>(),
                                              .out = out.As<float>(),
                                              .scratch = scratch.As<std::byte>(),
                                              .scale = attend.scale},
                                             stream);
  EXPECT_TRUE(status.ok()) << status;
  AttendOutcome outcome{.out = Download<float>(backend, out), .gains = {}};
  for (const DeviceLayer& layer : layers) outcome.gains.push_back(layer.Read().gains);
  for (const auto& recall : recalls) {
    outcome.recall.push_back(recall ? recall->Read() : RecallOutcome());
  }
  return outcome;
}

AttendCase RandomAttendCase(std::mt19937& rng, const KvShape& shape, int num_items) {
  // Around vectors, the kernels' blocks and pages.
  constexpr int64_t kLengths[] = {1, 2, 7, 15, 16, 17, 63, 65, 255, 256, 257, 511, 512, 513, 700};
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0};
  for (int i = 0; i < num_items; ++i) {
    const int64_t length = kLengths[rng() % std::size(kLengths)];
    const int num_sets = rng() % 2 == 0 ? 1 : shape.num_kv_heads;
    AttendCase::Item item{.layer = DenseLayer(rng, shape, num_sets, length + rng() % 20)};
    item.layer.used = length;
    item.num_tokens = rng() % 3 == 0 ? 1 + static_cast<int64_t>(rng() % 5) : 1;
    item.first_position = static_cast<Position>(std::max<int64_t>(length - item.num_tokens, 0));
    if (rng() % 2 == 0) ShufflePositions(rng, item.layer);
    if (rng() % 2 == 0) PunchHoles(rng, shape, 0.3, item.layer);
    for (int64_t& gain : item.layer.gains) gain = static_cast<int64_t>(rng() % 1000);
    attend.items.push_back(std::move(item));
  }
  attend.queries =
      RandomFloats(rng, attend.num_tokens() * shape.num_query_heads * shape.head_dim, 2);
  attend.scale = static_cast<float>(1 / std::sqrt(shape.head_dim));
  return attend;
}

AttendOutcome RunPrompt(Backend& backend, const PromptCase& prompt) {
  const DeviceLayer layer(backend, prompt.layer);
  const DeviceBuffer queries = Upload(backend, prompt.queries);
  const DeviceBuffer out = Upload(backend, std::vector<float>(prompt.queries.size(), NAN));
  const int64_t row = int64_t{prompt.shape.num_query_heads} * prompt.shape.head_dim;
  int64_t first = 0;
  Stream stream;
  for (const int64_t tokens : prompt.chunks) {
    // Exactly what is asked for, so that sanitizers see a byte too many.
    const DeviceBuffer scratch =
        *backend.Allocate(backend.PromptScratchBytes(prompt.shape, first + tokens));
    const absl::Status status =
        backend.AttendPrompt(prompt.shape,
                             {.layer = layer.view(),
                              .num_tokens = tokens,
                              .first_position = static_cast<Position>(first),
                              .score_from = prompt.score_from,
                              .gains = prompt.gains,
                              .queries = queries.As<float>(first * row * 4, tokens * row),
                              .out = out.As<float>(first * row * 4, tokens * row),
                              .scratch = scratch.As<std::byte>(),
                              .scale = prompt.scale},
                             stream);
    EXPECT_TRUE(status.ok()) << status;
    first += tokens;
  }
  return {.out = Download<float>(backend, out), .gains = {layer.Read().gains}};
}

PromptCase RandomPromptCase(std::mt19937& rng, const KvShape& shape, int64_t num_tokens) {
  PromptCase prompt{.shape = shape,
                    .layer = DenseLayer(rng, shape, 1, num_tokens + rng() % 40),
                    .queries = {},
                    .chunks = {num_tokens},
                    .score_from = 0,
                    .scale = static_cast<float>(1 / std::sqrt(shape.head_dim))};
  prompt.queries = RandomFloats(rng, num_tokens * shape.num_query_heads * shape.head_dim, 2);
  return prompt;
}

void ExpectClose(const AttendOutcome& actual, const AttendOutcome& expected, int64_t num_queries) {
  ASSERT_EQ(actual.out.size(), expected.out.size());
  for (size_t i = 0; i < expected.out.size(); ++i) {
    ASSERT_NEAR(actual.out[i], expected.out[i], 1e-5 * (1 + std::abs(expected.out[i])))
        << "output " << i;
  }
  ASSERT_EQ(actual.gains.size(), expected.gains.size());
  for (size_t item = 0; item < expected.gains.size(); ++item) {
    for (size_t i = 0; i < expected.gains[item].size(); ++i) {
      const auto want = static_cast<double>(expected.gains[item][i]);
      ASSERT_NEAR(static_cast<double>(actual.gains[item][i]), want,
                  2e-5 * want + static_cast<double>(num_queries))
          << "gain " << i << " of item " << item;
    }
  }
}

void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i]))
        << "output " << i << ": " << actual[i] << " and " << expected[i];
  }
}

}  // namespace heavywater
