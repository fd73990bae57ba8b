#include "worker/server/cache_choice.h"

#include <algorithm>

namespace heavywater {

void CacheChoice::NoteHome(bool answered, absl::Time now) {
  silent_since_ = answered ? absl::InfiniteFuture() : std::min(silent_since_, now);
}

bool CacheChoice::HomeIsLost(absl::Time now) const {
  return count_ > 1 && now - silent_since_ >= patience_;
}

void CacheChoice::BeginWaiting(absl::Time now, absl::Duration first_patience) {
  look_at_ = now + std::min(patience_, first_patience);
}

absl::Duration CacheChoice::UntilLook(absl::Time now) const {
  if (count_ == 1) return absl::InfiniteDuration();
  return std::max(absl::ZeroDuration(), std::min(look_at_, silent_since_ + patience_) - now);
}

bool CacheChoice::LooksElsewhere(absl::Time now) const {
  return UntilLook(now) == absl::ZeroDuration();
}

std::vector<int> CacheChoice::Others(absl::Time now) const {
  const int from = HomeIsLost(now) ? home_ : looked_at_;
  std::vector<int> others;
  for (int i = 1; i <= count_; ++i) {
    const int other = (from + i) % count_;
    if (other != home_) others.push_back(other);
  }
  return others;
}

void CacheChoice::NoteLooked(int answered, int last, absl::Time now) {
  looked_at_ = last;
  if (HomeIsLost(now)) {
    if (answered < 0) return;  // all are asked again and again
    Settle(answered, now);
  }
  BeginWaiting(now);
}

void CacheChoice::Settle(int service, absl::Time now) {
  home_ = service;
  looked_at_ = service;
  silent_since_ = absl::InfiniteFuture();
  look_at_ = absl::InfiniteFuture();
}

}  // namespace heavywater
