#include "worker/backend/cpu/picker.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "cache_service/base/check.h"
#include "worker/backend/sketch.h"

namespace heavywater {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Calls body(page, its words) for the pages with positions in the set and a copy, or that
// rest.
template <class Body>
void ForPages(const PickerQuery& query, std::span<const uint16_t> set, const Body& body) {
  const RecallView& recall = *query.recall;
  const int words_per_page = recall.sketch.page_tokens / kSketchBlock;
  for (int64_t page = 0; page < recall.num_pages; ++page) {
    const uint16_t* words = set.data() + page * words_per_page;
    const bool any = std::any_of(words, words + words_per_page, [](uint16_t w) { return w != 0; });
    if (any && MayPick(recall, query.kv_head, page)) body(page, words);
  }
}

const std::byte* SketchOf(const PickerQuery& query, int64_t page) {
  return SketchOfKvHead(*query.recall, query.kv_head, page);
}

// Which page follows is a guess: nearly all of them have demoted positions.
const std::byte* SketchAfter(const PickerQuery& query, int64_t page) {
  return page + 1 < query.recall->num_pages ? SketchOf(query, page + 1) : nullptr;
}

void AppendAll(const PickerQuery& query, std::span<const uint16_t> set,
               std::vector<Position>& picks) {
  const int page_tokens = query.recall->sketch.page_tokens;
  ForPages(query, set, [&](int64_t page, const uint16_t* words) {
    for (int word = 0; word < page_tokens / kSketchBlock; ++word) {
      for (uint32_t left = words[word]; left != 0; left &= left - 1) {
        picks.push_back(static_cast<Position>(page * page_tokens + word * kSketchBlock +
                                              std::countr_zero(left)));
      }
    }
  });
}

// Numbers of which the larger goes before: the larger value, of equal values the lower
// position. Values are above 0, so that their bits are in their order.
uint64_t KeyOf(const PickCandidate& candidate) {
  return uint64_t{std::bit_cast<uint32_t>(candidate.value)} << 32 |
         ~static_cast<uint32_t>(candidate.position);
}
Position PositionOf(uint64_t key) { return static_cast<Position>(~static_cast<uint32_t>(key)); }
float ValueOf(uint64_t key) { return std::bit_cast<float>(static_cast<uint32_t>(key >> 32)); }

// True when the pick's page rests: noted, and not to be read.
bool TakeOut(const PickerQuery& query, uint64_t key) {
  const RecallView& recall = *query.recall;
  const int64_t page = PositionOf(key) / recall.sketch.page_tokens;
  if (!Rests(recall, query.kv_head, page)) return false;
  AddMissed(recall, query.kv_head, page, double{ValueOf(key)});
  return true;
}

}  // namespace

// The queries' channels in the order of the sketch's tables.
void Picker::Prepare(const PickerQuery& query) {
  const SketchShape& sketch = query.recall->sketch;
  const int64_t num_heads = static_cast<int64_t>(query.queries.size());
  const int64_t num_chosen = PaddedRow(sketch.channels);
  const int64_t num_others = PaddedRow(sketch.head_dim - sketch.channels);
  floats_.assign(num_heads * (num_chosen + num_others + 5), 0.0f);
  sums_.resize(num_heads * kSketchBlock);
  weights_.resize(num_heads * num_chosen);
  float* chosen = floats_.data();
  float* others = chosen + num_heads * num_chosen;
  float* lse = others + num_heads * num_others;
  const uint8_t* channels =
      query.recall->channels.device_address() + int64_t{query.kv_head} * sketch.channels;
  uint16_t other_channels[kMaxKvHeadDim];
  ForOtherChannels(sketch, channels, [&](int channel, int index) {
    other_channels[index] = static_cast<uint16_t>(channel);
  });
  const int num_other_channels = sketch.head_dim - sketch.channels;
  for (int64_t head = 0; head < num_heads; ++head) {
    const float* from = query.queries[head];
    float* to = chosen + head * num_chosen;
    for (int i = 0; i < sketch.channels; ++i) to[i] = from[channels[i]];
    float* to_others = others + head * num_others;
    for (int i = 0; i < num_other_channels; ++i) to_others[i] = from[other_channels[i]];
    lse[head] = static_cast<float>(query.lse[head]);
  }
  scan_.sketch = sketch;
  scan_.num_heads = static_cast<int>(num_heads);
  scan_.chosen = chosen;
  scan_.others = others;
  scan_.lse = lse;
  scan_.constants = lse + num_heads;
  scan_.units = lse + 2 * num_heads;
  scan_.offsets = lse + 3 * num_heads;
  scan_.slopes = lse + 4 * num_heads;
  scan_.sums = sums_.data();
  scan_.weights = weights_.data();
}

void Picker::Add(std::span<const PickCandidate> found, int64_t max_picks) {
  for (const PickCandidate& candidate : found) {
    if (threshold_.Count(candidate.value)) best_.push_back(KeyOf(candidate));
  }
  // Many equal values are one bucket of the threshold's: it may not rise any further.
  const int64_t many = 4 * max_picks + static_cast<int64_t>(candidates_.size());
  if (static_cast<int64_t>(best_.size()) > many) Trim(max_picks);
}

// Leaves the best, in their order.
void Picker::Trim(int64_t max_picks) {
  const uint64_t reached = uint64_t{std::bit_cast<uint32_t>(threshold_.least())} << 32;
  std::erase_if(best_, [&](uint64_t key) { return key < reached; });
  if (static_cast<int64_t>(best_.size()) <= max_picks) return;
  ranked_ = best_;
  const auto last = ranked_.begin() + max_picks - 1;
  std::nth_element(ranked_.begin(), last, ranked_.end(), std::greater<>());
  std::erase_if(best_, [&](uint64_t key) { return key < *last; });
}

int64_t Picker::Pick(const ScanKernels& kernels, const PickerQuery& query,
                     std::vector<Position>& picks) {
  const RecallView& recall = *query.recall;
  const std::span<const uint16_t> set = DemotedOfKvHead(recall, query.num_sets, query.kv_head);
  if (recall.all) {
    AppendAll(query, set, picks);
    return 0;
  }
  if (recall.max_picks <= 0 || query.lse[0] == kNothing) return 0;
  Prepare(query);
  const int page_tokens = recall.sketch.page_tokens;
  const int64_t max_picks = std::min(recall.max_picks, recall.num_pages * page_tokens);
  candidates_.resize(page_tokens);
  best_.clear();
  threshold_.Start(max_picks, std::max(recall.min_share, std::numeric_limits<float>::min()));
  ForPages(query, set, [&](int64_t page, const uint16_t* words) {
    scan_.next = SketchAfter(query, page);
    const int64_t found = kernels.find_candidates(scan_, SketchOf(query, page), words,
                                                  static_cast<Position>(page * page_tokens),
                                                  threshold_.least(), candidates_.data());
    Add({candidates_.data(), static_cast<size_t>(found)}, max_picks);
  });
  Trim(max_picks);
  int64_t taken_out = 0;
  for (const uint64_t key : best_) {
    if (!recall.resting.empty() && TakeOut(query, key)) {
      ++taken_out;
    } else {
      picks.push_back(PositionOf(key));
    }
  }
  return taken_out;
}

float Picker::MissingShare(const ScanKernels& kernels, const PickerQuery& query,
                           std::span<const Position> picks) {
  const std::span<const uint16_t> set =
      DemotedOfKvHead(*query.recall, query.num_sets, query.kv_head);
  unpicked_.assign(set.begin(), set.end());
  for (const Position pick : picks) {
    unpicked_[pick / kSketchBlock] &= static_cast<uint16_t>(~(1u << pick % kSketchBlock));
  }
  Prepare(query);
  mass_.assign(query.queries.size(), 0.0);
  bool any = false;
  ForPages(query, unpicked_, [&](int64_t page, const uint16_t* words) {
    any = true;
    if (query.lse[0] == kNothing) return;
    scan_.next = SketchAfter(query, page);
    kernels.add_mass(scan_, SketchOf(query, page), words, mass_.data());
  });
  if (query.lse[0] == kNothing) return any ? 1 : 0;
  double share = 0;
  for (const double mass : mass_) share += mass / (1 + mass);
  return static_cast<float>(share / static_cast<double>(mass_.size()));
}

}  // namespace heavywater
