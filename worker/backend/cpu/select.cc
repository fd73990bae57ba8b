#include "worker/backend/cpu/select.h"

#include <algorithm>

namespace heavywater {

namespace {

// The worst go first: lower score, and of equal scores the higher position.
template <class Candidate>
bool GoesBefore(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score < b.score : a.position > b.position;
}

}  // namespace

// H2O's step, one in and one out, needs but the worst: it is found on the way.
void SlotSelector::Select(const Candidates& candidates, const SelectionParams& params,
                          std::span<uint8_t> kept) {
  const int64_t recent_from = params.tokens_seen - params.recent_tokens;
  const auto may_leave = [&](Position position) {
    return position >= params.sink_tokens && position < recent_from;
  };
  int64_t live = 0;
  int64_t evictable = 0;
  Candidate worst = {};
  for (size_t i = 0; i < candidates.positions.size(); ++i) {
    const Position position = candidates.positions[i];
    kept[i] = position != kNoPosition;
    live += kept[i];
    if (!may_leave(position)) continue;
    const Candidate candidate = {candidates.scores[i], position, static_cast<int32_t>(i)};
    if (evictable++ == 0 || GoesBefore(candidate, worst)) worst = candidate;
  }
  const int64_t leaving = std::clamp<int64_t>(live - params.budget_tokens, 0, evictable);
  if (leaving == 0) return;
  if (leaving == 1) {
    kept[worst.index] = 0;
    return;
  }
  candidates_.clear();
  for (size_t i = 0; i < candidates.positions.size(); ++i) {
    const Position position = candidates.positions[i];
    if (!may_leave(position)) continue;
    candidates_.push_back({candidates.scores[i], position, static_cast<int32_t>(i)});
  }
  if (leaving < evictable) {
    std::nth_element(candidates_.begin(), candidates_.begin() + leaving, candidates_.end(),
                     GoesBefore<Candidate>);
  }
  for (int64_t i = 0; i < leaving; ++i) kept[candidates_[i].index] = 0;
}

}  // namespace heavywater
