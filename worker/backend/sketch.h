// Sketches in host memory: what their bytes mean, how they are made. The scan is
// each backend's own (backend.h has its formula).
#pragma once

#include <cstdint>
#include <span>

#include "worker/backend/recall.h"
#include "worker/cache/kv_layout.h"

namespace heavywater {

// One KV head's sketch of one page (sketch_shape.h).
struct SketchPage {
  const uint8_t* codes = nullptr;
  const uint16_t* minima = nullptr;  // [channels] fp16
  const uint16_t* steps = nullptr;   // [channels] fp16
  const uint16_t* means = nullptr;   // [head_dim - channels] fp16
};
SketchPage SketchPageAt(const SketchShape& shape, const std::byte* page);

// Code of the chosen channel (by its index) at the page's row.
int SketchCode(const SketchShape& shape, const SketchPage& page, int64_t row, int chosen);

// Calls body(channel, index) for the channels that are not chosen, ascending;
// `index` counts them. `chosen` is [channels], ascending.
template <class Body>
void ForOtherChannels(const SketchShape& shape, const uint8_t* chosen, const Body& body) {
  int next = 0;
  for (int channel = 0; channel < shape.head_dim; ++channel) {
    if (next < shape.channels && chosen[next] == channel) {
      ++next;
    } else {
      body(channel, channel - next);
    }
  }
}

// The key as the sketch has it: float [head_dim].
void DecodeSketchRow(const SketchShape& shape, const SketchPage& page, const uint8_t* chosen,
                     int64_t row, float* key);

// The weights of one page and query head: int8 from products[c] = scale q_c step_c.
// Returns what one unit of the weights stands for; 0, and weights 0, where all
// products are as good as 0. Backends yield the same integers.
inline constexpr float kLeastProduct = 1e-30f;  // its inverse is finite
float QuantizeWeights(std::span<const float> products, int8_t* weights);

// The sketch of a page's keys of one KV head.
inline const std::byte* SketchOfKvHead(const RecallView& recall, int kv_head, int64_t page) {
  return recall.pages[page].device_address() + kv_head * recall.sketch.page_bytes();
}

// The key's words of the set of demoted positions, [num_pages * page_tokens / 16].
// Sets are one per KV head or one for all, as the layer's (LayerView::num_sets).
std::span<const uint16_t> DemotedOfKvHead(const RecallView& recall, int num_sets, int kv_head);

// The operations of Backend, in host memory.
void ObserveQueriesInHostMemory(const KvShape& shape, const ObserveQueriesParams& params);
void ChooseChannelsInHostMemory(const KvShape& shape, const ChooseChannelsParams& params);
void EncodePagesInHostMemory(const KvShape& shape, const EncodePagesParams& params);

}  // namespace heavywater
