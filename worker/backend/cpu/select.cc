#include "worker/backend/cpu/select.h"

#include <algorithm>

namespace heavywater {

void SlotSelector::Select(const Candidates& candidates, const SelectionParams& params,
                          std::span<uint8_t> kept) {
  const int64_t recent_from = params.tokens_seen - params.recent_tokens;
  candidates_.clear();
  int64_t live = 0;
  for (size_t i = 0; i < candidates.positions.size(); ++i) {
    const Position position = candidates.positions[i];
    kept[i] = position != kNoPosition;
    live += kept[i];
    if (position >= params.sink_tokens && position < recent_from) {
      candidates_.push_back({candidates.scores[i], position, static_cast<int32_t>(i)});
    }
  }
  const auto evictable = static_cast<int64_t>(candidates_.size());
  const int64_t leaving = std::clamp<int64_t>(live - params.budget_tokens, 0, evictable);
  if (leaving == 0) return;
  // The worst come first: lower score, and of equal scores the higher position.
  const auto goes_before = [](const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score < b.score : a.position > b.position;
  };
  if (leaving == 1) {  // H2O's step: one in, one out
    kept[std::min_element(candidates_.begin(), candidates_.end(), goes_before)->index] = 0;
    return;
  }
  if (leaving < evictable) {
    std::nth_element(candidates_.begin(), candidates_.begin() + leaving, candidates_.end(),
                     goes_before);
  }
  for (int64_t i = 0; i < leaving; ++i) kept[candidates_[i].index] = 0;
}

}  // namespace heavywater
