#include "worker/rank/demoted_ledger.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
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

std::vector<PositionGain> DemotedLedger::LargestGains(int head, int64_t count,
                                                      std::span<const uint8_t> absent,
                                                      int page_tokens) const {
  const auto is_absent = [&](int64_t position) {
    const auto page = static_cast<size_t>(position / page_tokens);
    return page < absent.size() && absent[page] != 0;
  };
  std::vector<PositionGain> gains;
  for (int64_t i = head * stride_; i < (head + 1) * stride_; ++i) {
    const int64_t gain = unreported_[i] + fresh_[i];
    if (gain <= 0 || is_absent(i - head * stride_)) continue;
    gains.push_back({static_cast<Position>(i - head * stride_), gain});
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

LedgerSnapshot DemotedLedger::Save(bool with_scores) const {
  LedgerSnapshot snapshot;
  snapshot.stride = stride_;
  for (const Score& score : scores_) {
    if (!with_scores) break;
    snapshot.scores.push_back(score.score);
    snapshot.clocks.push_back(score.clock);
  }
  for (int head = 0; head < num_heads_; ++head) {
    for (int64_t i = 0; i < stride_; ++i) {
      const int64_t gain = unreported_[head * stride_ + i];
      if (gain > 0) snapshot.unreported.push_back({head, {static_cast<Position>(i), gain}});
    }
  }
  return snapshot;
}

absl::Status DemotedLedger::Load(const LedgerSnapshot& snapshot) {
  // By division: the stride may be any number.
  const size_t size = snapshot.scores.size();
  const auto sets = static_cast<size_t>(num_sets_);
  if (snapshot.stride < 0 || static_cast<uint64_t>(snapshot.stride) != size / sets ||
      size % sets != 0 || snapshot.clocks.size() != size) {
    return absl::DataLossError(absl::StrCat("snapshot: a ledger has ", size, " scores and ",
                                            snapshot.clocks.size(), " clocks, want ", num_sets_,
                                            " times ", snapshot.stride, " of each"));
  }
  Grow(snapshot.stride);
  for (int set = 0; set < num_sets_; ++set) {
    for (int64_t i = 0; i < snapshot.stride; ++i) {
      const auto from = static_cast<size_t>(set * snapshot.stride + i);
      scores_[set * stride_ + i] = {snapshot.scores[from], snapshot.clocks[from]};
    }
  }
  for (const LedgerSnapshot::Gain& one : snapshot.unreported) {
    const Position position = one.gain.position;
    if (one.head < 0 || one.head >= num_heads_ || position < 0 || position >= stride_) {
      return absl::DataLossError(absl::StrCat("snapshot: a gain of head ", one.head, ", position ",
                                              position, ", want below ", num_heads_, " and ",
                                              stride_));
    }
    unreported_[one.head * stride_ + position] = one.gain.gain;
  }
  return absl::OkStatus();
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
