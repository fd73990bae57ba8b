#include "worker/backend/reference/recall_oracle.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "cache_service/base/float16.h"
#include "worker/backend/sketch.h"

namespace heavywater {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// A query head against one page.
struct PageEstimate {
  double constant = 0;
  double unit = 0;  // of the weights
  std::vector<int8_t> weights;
};

PageEstimate EstimatePage(const PickQuery& pick, const SketchPage& page, const float* query) {
  const SketchShape& sketch = pick.recall.sketch;
  const uint8_t* chosen =
      pick.recall.channels.device_address() + int64_t{pick.kv_head} * sketch.channels;
  PageEstimate estimate{.weights = std::vector<int8_t>(sketch.channels)};
  std::vector<float> products(sketch.channels);
  double sum = 0;
  for (int i = 0; i < sketch.channels; ++i) {
    const float q = query[chosen[i]];
    sum += double{q} * Float16ToFloat(page.minima[i]);
    products[i] = q * pick.scale * Float16ToFloat(page.steps[i]);
  }
  ForOtherChannels(sketch, chosen, [&](int channel, int index) {
    sum += double{query[channel]} * Float16ToFloat(page.means[index]);
  });
  estimate.constant = pick.scale * sum;
  estimate.unit = QuantizeWeights(products, estimate.weights.data());
  return estimate;
}

SketchPage SketchOf(const PickQuery& pick, int64_t page) {
  return SketchPageAt(pick.recall.sketch, SketchOfKvHead(pick.recall, pick.kv_head, page));
}

}  // namespace

std::vector<Position> DemotedPositions(const RecallView& recall, int num_sets, int kv_head) {
  const std::span<const uint16_t> words = DemotedOfKvHead(recall, num_sets, kv_head);
  std::vector<Position> positions;
  for (size_t word = 0; word < words.size(); ++word) {
    for (int bit = 0; bit < kSketchBlock; ++bit) {
      const auto position = static_cast<Position>(word * kSketchBlock + bit);
      if ((words[word] >> bit & 1) == 0) continue;
      if (!MayPick(recall, kv_head, position / recall.sketch.page_tokens)) continue;
      positions.push_back(position);
    }
  }
  return positions;
}

std::vector<std::vector<double>> EstimateLogits(const PickQuery& pick,
                                                std::span<const Position> positions) {
  const SketchShape& sketch = pick.recall.sketch;
  std::vector<std::vector<double>> logits;
  std::vector<PageEstimate> estimates;
  int64_t page = -1;
  for (const Position position : positions) {
    const SketchPage codes = SketchOf(pick, position / sketch.page_tokens);
    if (page != position / sketch.page_tokens) {
      page = position / sketch.page_tokens;
      estimates.clear();
      for (const float* query : pick.queries) {
        estimates.push_back(EstimatePage(pick, codes, query));
      }
    }
    std::vector<double>& row = logits.emplace_back();
    for (const PageEstimate& estimate : estimates) {
      int64_t sum = 0;
      for (int i = 0; i < sketch.channels; ++i) {
        sum += estimate.weights[i] * SketchCode(sketch, codes, position % sketch.page_tokens, i);
      }
      row.push_back(estimate.constant + estimate.unit * static_cast<double>(sum));
    }
  }
  return logits;
}

std::vector<Position> PickPositions(const PickQuery& pick, int64_t* missed) {
  *missed = 0;
  std::vector<Position> demoted = DemotedPositions(pick.recall, pick.num_sets, pick.kv_head);
  if (pick.recall.all) return demoted;
  if (pick.lse[0] == kNothing) return {};
  const std::vector<std::vector<double>> logits = EstimateLogits(pick, demoted);
  struct Candidate {
    double value;
    Position position;
  };
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < demoted.size(); ++i) {
    double value = 0;
    for (size_t head = 0; head < pick.queries.size(); ++head) {
      value += std::exp(logits[i][head] - pick.lse[head]);
    }
    value /= static_cast<double>(pick.queries.size());
    if (value >= pick.recall.min_share) candidates.push_back({value, demoted[i]});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
  if (static_cast<int64_t>(candidates.size()) > pick.recall.max_picks) {
    candidates.resize(pick.recall.max_picks);
  }
  std::vector<Position> picks;
  for (const Candidate& candidate : candidates) {
    const int64_t page = candidate.position / pick.recall.sketch.page_tokens;
    if (!Rests(pick.recall, pick.kv_head, page)) {
      picks.push_back(candidate.position);
      continue;
    }
    AddMissed(pick.recall, pick.kv_head, page, candidate.value);
    ++*missed;
  }
  std::sort(picks.begin(), picks.end());
  return picks;
}

double MissingShare(const PickQuery& pick, std::span<const Position> picks,
                    std::span<const double> attended) {
  const std::vector<Position> demoted = DemotedPositions(pick.recall, pick.num_sets, pick.kv_head);
  std::vector<Position> unpicked;
  std::set_difference(demoted.begin(), demoted.end(), picks.begin(), picks.end(),
                      std::back_inserter(unpicked));
  if (unpicked.empty()) return 0;
  const std::vector<std::vector<double>> logits = EstimateLogits(pick, unpicked);
  double share = 0;
  for (size_t head = 0; head < pick.queries.size(); ++head) {
    if (attended[head] == kNothing) return 1;
    double mass = 0;
    for (const std::vector<double>& row : logits) mass += std::exp(row[head] - attended[head]);
    share += mass / (1 + mass);
  }
  return share / static_cast<double>(pick.queries.size());
}

}  // namespace heavywater
