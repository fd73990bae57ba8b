// How sketches are made. Sums run in a fixed order, so that every run, and every
// backend in host memory, yields the same bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cache_service/base/check.h"
#include "cache_service/base/float16.h"
#include "worker/backend/sketch.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

// The keys of one page that count, as floats when asked for.
struct PageKeys {
  const std::byte* page = nullptr;
  KvDtype dtype = KvDtype::kFloat32;
  int head_dim = 0;
  int64_t row_bytes = 0;  // K and V
  int64_t count = 0;

  void Load(int64_t row, float* key) const {
    LoadKvRow(dtype, page + row * row_bytes, {key, static_cast<size_t>(head_dim)});
  }
};

// Empty when the page has no copy, or no position below num_positions.
PageKeys KeysOfPage(const KvShape& shape, const SketchShape& sketch, const HostPageTable& host,
                    int kv_head, int64_t page, int64_t num_positions) {
  const std::byte* address = host.Page(kv_head, page);
  const int64_t left = num_positions - page * sketch.page_tokens;
  if (address == nullptr || left <= 0) return {};
  return {.page = address,
          .dtype = shape.dtype,
          .head_dim = shape.head_dim,
          .row_bytes = shape.row_bytes(),
          .count = std::min<int64_t>(left, sketch.page_tokens)};
}

// Sums over a page are short and in float; over pages in double.
struct Moments {
  std::vector<double> mean;
  std::vector<double> squares;  // of the deviations from the mean
  double count = 0;

  explicit Moments(int head_dim) : mean(head_dim), squares(head_dim) {}

  // Chan, Golub, LeVeque: two sets' moments give their union's.
  void Add(const PageKeys& keys) {
    float key[kMaxKvHeadDim];
    float sums[kMaxKvHeadDim] = {};
    float deviations[kMaxKvHeadDim] = {};
    for (int64_t row = 0; row < keys.count; ++row) {
      keys.Load(row, key);
      for (int i = 0; i < keys.head_dim; ++i) sums[i] += key[i];
    }
    for (int i = 0; i < keys.head_dim; ++i) sums[i] /= static_cast<float>(keys.count);
    for (int64_t row = 0; row < keys.count; ++row) {
      keys.Load(row, key);
      for (int i = 0; i < keys.head_dim; ++i) {
        const float deviation = key[i] - sums[i];
        deviations[i] += deviation * deviation;
      }
    }
    const auto added = static_cast<double>(keys.count);
    const double total = count + added;
    for (int i = 0; i < keys.head_dim; ++i) {
      const double difference = sums[i] - mean[i];
      mean[i] += difference * (added / total);
      squares[i] += deviations[i] + difference * difference * (count * added / total);
    }
    count = total;
  }
};

// Mean square of the observed queries; 1 everywhere when none was seen, so that
// the variance decides alone.
std::vector<double> QueryEnergy(const ChooseChannelsParams& params, int kv_head) {
  const int head_dim = params.sketch.head_dim;
  std::vector<double> energy(head_dim, params.num_queries == 0 ? 1.0 : 0.0);
  const float* squares =
      params.squares.device_address() + int64_t{kv_head} * kSketchQueries * head_dim;
  for (int64_t query = 0; query < params.num_queries; ++query) {
    for (int i = 0; i < head_dim; ++i) energy[i] += squares[query * head_dim + i];
  }
  return energy;
}

// What a page's codes are made with.
struct PageScale {
  float minimum[kMaxKvHeadDim];       // of each chosen channel, as stored
  float inverse_step[kMaxKvHeadDim];  // 0 where the channel is constant
};

// Writes minima, steps and means.
PageScale EncodeScale(const SketchShape& sketch, const PageKeys& keys, const uint8_t* chosen,
                      std::byte* to) {
  float key[kMaxKvHeadDim];
  float minimum[kMaxKvHeadDim];
  float maximum[kMaxKvHeadDim];
  float sum[kMaxKvHeadDim];
  keys.Load(0, minimum);
  std::copy_n(minimum, sketch.head_dim, maximum);
  std::copy_n(minimum, sketch.head_dim, sum);
  for (int64_t row = 1; row < keys.count; ++row) {
    keys.Load(row, key);
    for (int i = 0; i < sketch.head_dim; ++i) minimum[i] = std::min(minimum[i], key[i]);
    for (int i = 0; i < sketch.head_dim; ++i) maximum[i] = std::max(maximum[i], key[i]);
    for (int i = 0; i < sketch.head_dim; ++i) sum[i] += key[i];
  }
  PageScale scale;
  auto* minima = reinterpret_cast<uint16_t*>(to + sketch.minima_offset());
  auto* steps = reinterpret_cast<uint16_t*>(to + sketch.steps_offset());
  for (int i = 0; i < sketch.channels; ++i) {
    minima[i] = FloatToFloat16(minimum[chosen[i]]);
    scale.minimum[i] = Float16ToFloat(minima[i]);
    const float largest = std::clamp(maximum[chosen[i]], -kMaxFloat16, kMaxFloat16);
    steps[i] = FloatToFloat16(std::max(0.0f, (largest - scale.minimum[i]) / 15));
    const float step = Float16ToFloat(steps[i]);
    scale.inverse_step[i] = step > 0 ? 1 / step : 0;
  }
  auto* means = reinterpret_cast<uint16_t*>(to + sketch.means_offset());
  ForOtherChannels(sketch, chosen, [&](int channel, int index) {
    means[index] = FloatToFloat16(sum[channel] / static_cast<float>(keys.count));
  });
  return scale;
}

// Codes of the chosen channels of one row, into their block.
void EncodeRow(const SketchShape& sketch, const PageScale& scale, const float* key,
               const uint8_t* chosen, int64_t row, uint8_t* codes) {
  float values[kMaxKvHeadDim];
  int32_t nearest[kMaxKvHeadDim];
  for (int i = 0; i < sketch.channels; ++i) values[i] = key[chosen[i]];
  for (int i = 0; i < sketch.channels; ++i) {
    const float code = (values[i] - scale.minimum[i]) * scale.inverse_step[i] + 0.5f;
    nearest[i] = static_cast<int32_t>(std::min(15.5f, std::max(0.0f, code)));
  }
  const int64_t block_bytes = int64_t{sketch.channels} / 2 * kSketchBlock;
  uint8_t* to = codes + row / kSketchBlock * block_bytes + row % kSketchBlock * 4;
  for (int i = 0; i < sketch.channels; i += 8, to += kSketchBlock * 4) {
    for (int j = 0; j < 4; ++j) {
      to[j] = static_cast<uint8_t>(nearest[i + j] | nearest[i + 4 + j] << 4);
    }
  }
}

void EncodePage(const SketchShape& sketch, const PageKeys& keys, const uint8_t* chosen,
                std::byte* to) {
  // Rows that do not count yet, and what pads the page, are zero.
  std::memset(to, 0, sketch.page_bytes());
  const PageScale scale = EncodeScale(sketch, keys, chosen, to);
  float key[kMaxKvHeadDim];
  for (int64_t row = 0; row < keys.count; ++row) {
    keys.Load(row, key);
    EncodeRow(sketch, scale, key, chosen, row, reinterpret_cast<uint8_t*>(to));
  }
}

}  // namespace

void ObserveQueriesInHostMemory(const KvShape& shape, const ObserveQueriesParams& params) {
  const int head_dim = shape.head_dim;
  const int64_t first = std::max<int64_t>(params.num_tokens - kSketchQueries, 0);
  for (int64_t token = first; token < params.num_tokens; ++token) {
    const int64_t entry = (params.first_position + token) % kSketchQueries;
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      float* squares =
          params.squares.device_address() + (kv_head * kSketchQueries + entry) * head_dim;
      std::fill_n(squares, head_dim, 0.0f);
      for (int head = 0; head < shape.group_size(); ++head) {
        const int64_t row =
            token * shape.num_query_heads + int64_t{kv_head} * shape.group_size() + head;
        const float* query = params.queries.device_address() + row * head_dim;
        for (int i = 0; i < head_dim; ++i) squares[i] += query[i] * query[i];
      }
    }
  }
}

void ChooseChannelsInHostMemory(const KvShape& shape, const ChooseChannelsParams& params) {
  const SketchShape& sketch = params.sketch;
  HW_CHECK(sketch.head_dim == shape.head_dim && sketch.head_dim <= kMaxKvHeadDim);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    Moments moments(sketch.head_dim);
    for (int64_t page = 0; page * sketch.page_tokens < params.num_positions; ++page) {
      const PageKeys keys =
          KeysOfPage(shape, sketch, params.host, kv_head, page, params.num_positions);
      if (keys.count > 0) moments.Add(keys);
    }
    std::vector<double> value = QueryEnergy(params, kv_head);
    for (int i = 0; i < sketch.head_dim; ++i) value[i] *= moments.squares[i];
    std::vector<int> order(sketch.head_dim);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return value[a] > value[b]; });
    std::sort(order.begin(), order.begin() + sketch.channels);
    std::copy_n(order.begin(), sketch.channels,
                params.channels.device_address() + int64_t{kv_head} * sketch.channels);
  }
}

void EncodePagesInHostMemory(const KvShape& shape, const EncodePagesParams& params) {
  const SketchShape& sketch = params.sketch;
  HW_CHECK(sketch.head_dim == shape.head_dim && sketch.head_dim <= kMaxKvHeadDim);
  HW_CHECK(params.end_page <= static_cast<int64_t>(params.pages.size()));
  for (int64_t page = params.first_page; page < params.end_page; ++page) {
    HW_CHECK(params.pages[page].size() >= shape.num_kv_heads * sketch.page_bytes());
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const PageKeys keys =
          KeysOfPage(shape, sketch, params.host, kv_head, page, params.num_positions);
      if (keys.count == 0) continue;
      EncodePage(sketch, keys,
                 params.channels.device_address() + int64_t{kv_head} * sketch.channels,
                 params.pages[page].device_address() + kv_head * sketch.page_bytes());
    }
  }
}

}  // namespace heavywater
