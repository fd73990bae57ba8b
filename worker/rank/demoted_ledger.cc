#include "worker/rank/demoted_ledger.h"

#include <algorithm>
#include <numeric>

#include "cache_service/base/check.h"
#include "worker/rank/decay.h"
#include "worker/rank/restrided.h"

namespace heavywater {
void DemotedLedger::Grow(int64_t tokens) {
  if (tokens <= stride_) return;
  // Grown by a half at least, so that a long generation copies little.
  const int64_t stride = std::max(tokens, stride_ + stride_ / 2);
  scores_ = Restrided(scores_, num_sets_, stride_, stride);
  unreported_ = Restrided(unreported_, num_heads_, stride_, stride);
  fresh_ = Restrided(fresh_, num_heads_, stride_, stride);
  stride_ = stride;
}

int64_t DemotedLedger::FreshMass(int head) const {
  const auto first = fresh_.begin() + head * stride_;
  return std::accumulate(first, first + stride_, int64_t{0});
}

void DemotedLedger::ForgetFreshGains() { std::fill(fresh_.begin(), fresh_.end(), 0); }

std::vector<PositionGain> DemotedLedger::LargestGains(int head, int64_t count) const {
  std::vector<PositionGain> gains;
  for (int64_t i = head * stride_; i < (head + 1) * stride_; ++i) {
    const int64_t gain = unreported_[i] + fresh_[i];
    if (gain > 0) gains.push_back({static_cast<Position>(i - head * stride_), gain});
  }
  if (count < static_cast<int64_t>(gains.size())) {
    std::nth_element(gains.begin(), gains.begin() + count, gains.end(),
                     [](const PositionGain& a, const PositionGain& b) {
                       return a.gain != b.gain ? a.gain > b.gain : a.position < b.position;
                     });
    gains.resize(count);
    std::sort(gains.begin(), gains.end(),
              [](const PositionGain& a, const PositionGain& b) { return a.position < b.position; });
  }
  return gains;
}

void DemotedLedger::ClearGain(int head, Position position) {
  HW_CHECK(position >= 0 && position < stride_);
  unreported_[head * stride_ + position] = 0;
}

void DemotedLedger::MergeGains() {
  for (size_t i = 0; i < fresh_.size(); ++i) unreported_[i] += fresh_[i];
  ForgetFreshGains();
}

void DemotedLedger::SetScore(int set, Position position, int64_t score, int64_t clock) {
  HW_CHECK(position >= 0 && position < stride_);
  scores_[set * stride_ + position] = {.score = score, .clock = clock};
}

int64_t DemotedLedger::ScoreAt(int set, Position position, double decay, int64_t clock) const {
  HW_CHECK(position >= 0 && position < stride_);
  const Score& score = scores_[set * stride_ + position];
  return Decayed(score.score, DecayPower(decay, clock - score.clock));
}

}  // namespace heavywater
