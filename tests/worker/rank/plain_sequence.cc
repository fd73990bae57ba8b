#include "tests/worker/rank/plain_sequence.h"

#include <cmath>
#include <cstdlib>
#include <set>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

std::set<Position> PositionsOf(const Ledger& ledger) {
  std::set<Position> positions;
  for (const auto& [position, score] : ledger) positions.insert(position);
  return positions;
}

std::string CompareSet(const Ledger& got, const Ledger& want, int64_t tolerance) {
  if (PositionsOf(got) != PositionsOf(want)) {
    std::string text = "kept positions differ:";
    for (const auto& [position, score] : got) {
      if (!want.contains(position)) absl::StrAppend(&text, " +", position);
    }
    for (const auto& [position, score] : want) {
      if (!got.contains(position)) absl::StrAppend(&text, " -", position);
    }
    return text;
  }
  for (const auto& [position, score] : got) {
    if (std::abs(score - want.at(position)) <= tolerance) continue;
    return absl::StrCat("score of position ", position, " is ", score, ", want ",
                        want.at(position));
  }
  return "";
}

}  // namespace

PlainSequence::PlainSequence(const TestGroup& group, const PolicyOptions& policy)
    : group_(group), last_out_(group.options().num_layers) {
  for (int layer = 0; layer < group.options().num_layers; ++layer) {
    layers_.emplace_back(group.plain_shape(),
                         PlainPolicyOf(policy, layer, group.options().num_layers));
  }
}

void PlainSequence::Prompt(const std::vector<int32_t>& tokens) {
  last_tokens_ = tokens;
  last_first_ = 0;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const SyntheticRow rows = group_.Rows(static_cast<int>(layer), tokens, 0);
    last_out_[layer] = layers_[layer].Prompt(rows.q, rows.k, rows.v);
  }
}

void PlainSequence::Append(const std::vector<int32_t>& tokens) {
  last_tokens_ = tokens;
  last_first_ = static_cast<Position>(tokens_seen());
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const SyntheticRow rows = group_.Rows(static_cast<int>(layer), tokens, last_first_);
    last_out_[layer] = layers_[layer].Append(rows.q, rows.k, rows.v);
  }
}

void PlainSequence::Append(const std::vector<int32_t>& tokens, bool plan_due) {
  last_tokens_ = tokens;
  last_first_ = static_cast<Position>(tokens_seen());
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const SyntheticRow rows = group_.Rows(static_cast<int>(layer), tokens, last_first_);
    last_out_[layer] = layers_[layer].Append(rows.q, rows.k, rows.v, plan_due);
  }
}

void PlainSequence::SetHostMemory(const PlainHostMemory& host) {
  for (PlainLayer& layer : layers_) layer.SetHostMemory(host);
}

void PlainSequence::ForgetGains() {
  for (PlainLayer& layer : layers_) layer.ForgetGains();
}

std::string PlainSequence::CompareAttention(TestGroup& group, int layer) const {
  const size_t width = last_out_[layer].size() / last_tokens_.size();
  for (size_t i = 0; i < last_tokens_.size(); ++i) {
    const std::vector<float> got =
        group.Attention(layer, last_tokens_[i], last_first_ + static_cast<Position>(i));
    for (size_t j = 0; j < width; ++j) {
      const float want = last_out_[layer][i * width + j];
      if (std::abs(got[j] - want) <= 1e-4f) continue;
      return absl::StrCat("attention of token ", i, ", element ", j, " is ", got[j], ", want ",
                          want);
    }
  }
  return "";
}

std::string PlainSequence::Compare(TestGroup& group, SequenceId sequence, int64_t tolerance) const {
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const std::vector<Ledger> got = group.Sets(sequence, layer);
    const std::vector<Ledger>& want = layers_[layer].sets();
    if (got.size() != want.size()) {
      return absl::StrCat(got.size(), " sets, want ", want.size());
    }
    for (size_t set = 0; set < got.size(); ++set) {
      const std::string difference = CompareSet(got[set], want[set], tolerance);
      if (!difference.empty()) {
        return absl::StrCat("layer ", layer, ", set ", set, ": ", difference);
      }
    }
    const std::string difference = CompareAttention(group, layer);
    if (!difference.empty()) return absl::StrCat("layer ", layer, ": ", difference);
  }
  return "";
}

int64_t PlainSequence::CountDifferentNearTheCut(TestGroup& group, SequenceId sequence) const {
  int64_t different = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const std::vector<Ledger> got = group.Sets(sequence, layer);
    for (size_t set = 0; set < got.size(); ++set) {
      const PlainChoice& choice = layers_[layer].choices()[set];
      const double cut = static_cast<double>(choice.cut);
      for (const auto& [position, score] : got[set]) {
        if (layers_[layer].sets()[set].contains(position)) continue;
        const auto ranked = choice.ranking.find(position);
        if (ranked == choice.ranking.end()) return -1;
        // A probability next to the threshold is pivotal for one and not for the other.
        const double tolerance = layers_[layer].counts_pivotal() ? 4294967296.0 : 1e-4 * cut;
        if (std::abs(static_cast<double>(ranked->second) - cut) > tolerance) return -1;
        ++different;
      }
    }
  }
  return different;
}

}  // namespace heavywater
