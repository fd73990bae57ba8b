#include "tests/worker/rank/plain_recall.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace heavywater {
namespace {

// The nearest fp16, ties to even.
double Half(double value) {
  if (value == 0) return 0;
  const int exponent = std::max(std::ilogb(value), -14);
  const double quantum = std::ldexp(1.0, exponent - 10);
  return std::clamp(std::nearbyint(value / quantum) * quantum, -65504.0, 65504.0);
}

// A quarter of the head in groups of 8, at least 24 channels of 64 and more. Random cases
// have no device_ratio.
int DefaultChannels(int head_dim) {
  const int quarter = (head_dim + 31) / 32 * 8;
  return head_dim < 64 ? quarter : std::max(quarter, 24);
}

}  // namespace

void PlainSketch::Choose(const std::vector<std::vector<double>>& keys) {
  const int channels = options_.recall.sketch_channels > 0 ? options_.recall.sketch_channels
                                                           : DefaultChannels(options_.head_dim);
  std::vector<std::pair<double, int>> ranked;  // (-telling, channel)
  for (int c = 0; c < options_.head_dim; ++c) {
    double energy = 0;
    const size_t first = squares_.size() - std::min<size_t>(squares_.size(), 32);
    for (size_t i = first; i < squares_.size(); ++i) energy += squares_[i][c];
    double mean = 0;
    for (const auto& key : keys) mean += key[c] / static_cast<double>(keys.size());
    double variance = 0;
    for (const auto& key : keys) variance += (key[c] - mean) * (key[c] - mean);
    ranked.emplace_back(-energy * variance, c);
  }
  std::sort(ranked.begin(), ranked.end());
  chosen_.clear();
  for (int i = 0; i < channels; ++i) chosen_.push_back(ranked[i].second);
  std::sort(chosen_.begin(), chosen_.end());
}

void PlainSketch::Encode(const std::vector<std::vector<double>>& keys, Position first) {
  const int page_tokens = options_.page_tokens;
  for (size_t index = first / page_tokens; index * page_tokens < keys.size(); ++index) {
    const size_t begin = index * page_tokens;
    const size_t end = std::min(begin + page_tokens, keys.size());
    Page page;
    page.codes.resize(end - begin);
    page.means.resize(options_.head_dim);
    for (int c = 0; c < options_.head_dim; ++c) {
      float sum = 0;  // float32 decides which way the 16 bits round
      for (size_t p = begin; p < end; ++p) sum += static_cast<float>(keys[p][c]);
      page.means[c] = Half(sum / static_cast<float>(end - begin));
    }
    for (int c : chosen_) {
      page.means[c] = 0;
      double low = keys[begin][c], high = low;
      for (size_t p = begin; p < end; ++p) {
        low = std::min(low, keys[p][c]);
        high = std::max(high, keys[p][c]);
      }
      page.minima.push_back(Half(low));
      const auto range = static_cast<float>(high) - static_cast<float>(page.minima.back());
      page.steps.push_back(Half(std::max(0.0f, range / 15)));
      for (size_t p = begin; p < end; ++p) {
        // In float32 and halves up, since 16-bit keys often lie half-way.
        const auto step = static_cast<float>(page.steps.back());
        const float above = static_cast<float>(keys[p][c]) - static_cast<float>(page.minima.back());
        const float code = step == 0 ? 0 : std::floor(above * (1 / step) + 0.5f);
        page.codes[p - begin].push_back(static_cast<int>(std::clamp(code, 0.0f, 15.0f)));
      }
    }
    pages_.resize(std::max(pages_.size(), index + 1));
    pages_[index] = std::move(page);
  }
}

std::vector<double> PlainSketch::Estimates(const std::vector<float>& query, float scale,
                                           const std::vector<Position>& positions) const {
  std::vector<double> estimates;
  for (const Position position : positions) {
    const Page& page = pages_[position / options_.page_tokens];
    const std::vector<int>& codes = page.codes[position % options_.page_tokens];
    double sum = 0;
    for (int c = 0; c < options_.head_dim; ++c) sum += double{query[c]} * page.means[c];
    std::vector<float> products;
    float largest = 0;
    for (size_t i = 0; i < chosen_.size(); ++i) {
      const float q = query[chosen_[i]];
      sum += double{q} * page.minima[i];
      products.push_back(q * scale * static_cast<float>(page.steps[i]));
      largest = std::max(largest, std::abs(products.back()));
    }
    int64_t dot = 0;
    for (size_t i = 0; i < chosen_.size() && largest > 0; ++i) {
      dot += std::lrintf(products[i] * (127 / largest)) * codes[i];
    }
    estimates.push_back(scale * sum + largest / 127 * static_cast<double>(dot));
  }
  return estimates;
}

std::vector<Position> PlainSketch::Pick(const std::vector<std::vector<float>>& queries,
                                        const std::vector<double>& lse, float scale,
                                        const std::vector<Position>& demoted) const {
  if (options_.recall.all) return demoted;
  std::vector<double> shares(demoted.size());
  for (size_t g = 0; g < queries.size(); ++g) {
    const std::vector<double> estimates = Estimates(queries[g], scale, demoted);
    for (size_t i = 0; i < demoted.size(); ++i) {
      shares[i] += std::exp(estimates[i] - lse[g]) / static_cast<double>(queries.size());
    }
  }
  std::vector<std::pair<double, Position>> ranked;
  for (size_t i = 0; i < demoted.size(); ++i) {
    if (shares[i] >= static_cast<float>(options_.recall.min_share)) {
      ranked.emplace_back(-shares[i], demoted[i]);
    }
  }
  std::sort(ranked.begin(), ranked.end());
  ranked.resize(std::min<size_t>(ranked.size(), options_.recall.recall_tokens));
  std::vector<Position> picks;
  for (const auto& [share, position] : ranked) picks.push_back(position);
  std::sort(picks.begin(), picks.end());
  return picks;
}

}  // namespace heavywater
