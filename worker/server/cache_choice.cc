#include "worker/server/cache_choice.h"

#include <algorithm>

namespace heavywater {

void CacheChoice::NoteHome(bool answered, absl::Time now) {
  silent_since_ = answered ? absl::InfiniteFuture() : std::min(silent_since_, now);
}

bool CacheChoice::HomeIsLost(absl::Time now) const {
  return count_ > 1 && now - silent_since_ >= patience_;
}

bool CacheChoice::LooksElsewhere(absl::Time now) const {
  return HomeIsLost(now) || (count_ > 1 && now - waiting_since_ >= patience_);
}

std::vector<int> CacheChoice::Others() const {
  std::vector<int> others;
  for (int i = 1; i < count_; ++i) others.push_back((home_ + i) % count_);
  return others;
}

void CacheChoice::NoteLooked(int answered, absl::Time now) {
  if (answered >= 0 && HomeIsLost(now)) {
    Settle(answered, now);
    BeginWaiting(now);
  } else if (!HomeIsLost(now)) {
    BeginWaiting(now);
  }
}

void CacheChoice::Settle(int service, absl::Time now) {
  home_ = service;
  silent_since_ = absl::InfiniteFuture();
  waiting_since_ = absl::InfiniteFuture();
}

}  // namespace heavywater
