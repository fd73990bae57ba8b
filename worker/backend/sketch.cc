#include "worker/backend/sketch.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache_service/base/check.h"
#include "cache_service/base/float16.h"

namespace heavywater {
namespace {

constexpr int kGroup = 8;  // channels whose codes lie together

// The byte that holds the code of a chosen channel, and its shift.
int64_t CodeByte(const SketchShape& shape, int64_t row, int chosen) {
  const int64_t block = row / kSketchBlock * (shape.channels / kGroup) + chosen / kGroup;
  return (block * kSketchBlock + row % kSketchBlock) * 4 + chosen % 4;
}
int CodeShift(int chosen) { return chosen % kGroup < 4 ? 0 : 4; }

}  // namespace

SketchPage SketchPageAt(const SketchShape& shape, const std::byte* page) {
  return {.codes = reinterpret_cast<const uint8_t*>(page),
          .minima = reinterpret_cast<const uint16_t*>(page + shape.minima_offset()),
          .steps = reinterpret_cast<const uint16_t*>(page + shape.steps_offset()),
          .means = reinterpret_cast<const uint16_t*>(page + shape.means_offset())};
}

int SketchCode(const SketchShape& shape, const SketchPage& page, int64_t row, int chosen) {
  return page.codes[CodeByte(shape, row, chosen)] >> CodeShift(chosen) & 0xf;
}

void DecodeSketchRow(const SketchShape& shape, const SketchPage& page, const uint8_t* chosen,
                     int64_t row, float* key) {
  for (int i = 0; i < shape.channels; ++i) {
    key[chosen[i]] =
        Float16ToFloat(page.minima[i]) +
        Float16ToFloat(page.steps[i]) * static_cast<float>(SketchCode(shape, page, row, i));
  }
  ForOtherChannels(shape, chosen, [&](int channel, int index) {
    key[channel] = Float16ToFloat(page.means[index]);
  });
}

float QuantizeWeights(std::span<const float> products, int8_t* weights) {
  float maximum = 0;
  for (const float product : products) maximum = std::max(maximum, std::abs(product));
  if (maximum < kLeastProduct) {
    std::fill_n(weights, products.size(), int8_t{0});
    return 0;
  }
  const float inverse = 127.0f / maximum;
  for (size_t i = 0; i < products.size(); ++i) {
    weights[i] = static_cast<int8_t>(std::lrintf(products[i] * inverse));
  }
  return maximum / 127.0f;
}

std::span<const uint16_t> DemotedOfKvHead(const RecallView& recall, int num_sets, int kv_head) {
  const int64_t words = recall.num_pages * recall.sketch.page_tokens / kSketchBlock;
  const int64_t set = num_sets == 1 ? 0 : kv_head;
  HW_CHECK(recall.demoted.size() >= (set + 1) * words);
  return {recall.demoted.device_address() + set * words, static_cast<size_t>(words)};
}

}  // namespace heavywater
