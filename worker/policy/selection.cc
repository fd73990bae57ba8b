#include "worker/policy/selection.h"

#include <algorithm>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

bool IsProtected(Position position, const SelectionParams& params) {
  return position < params.sink_tokens || position >= params.tokens_seen - params.recent_tokens;
}

}  // namespace

std::vector<int32_t> SelectKept(const Candidates& candidates, const SelectionParams& params) {
  const auto& [positions, scores] = candidates;
  HW_CHECK(positions.size() == scores.size());
  std::vector<int32_t> kept;
  std::vector<int32_t> rest;
  for (int32_t i = 0; i < static_cast<int32_t>(positions.size()); ++i) {
    if (positions[i] == kNoPosition) continue;
    (IsProtected(positions[i], params) ? kept : rest).push_back(i);
  }

  const int64_t room = std::clamp<int64_t>(params.budget_tokens - static_cast<int64_t>(kept.size()),
                                           0, static_cast<int64_t>(rest.size()));
  const auto is_better = [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : positions[a] < positions[b];
  };
  if (room < static_cast<int64_t>(rest.size())) {
    std::nth_element(rest.begin(), rest.begin() + room, rest.end(), is_better);
    rest.resize(room);
  }
  kept.insert(kept.end(), rest.begin(), rest.end());
  std::sort(kept.begin(), kept.end());
  return kept;
}

}  // namespace heavywater
