#include "cache_service/cluster/members.h"

namespace heavywater {

void Members::Reset(const std::vector<v1::ServiceRecord>& services) {
  MutexLock lock(&mutex_);
  here_.clear();
  left_.clear();
  for (const v1::ServiceRecord& record : services) here_[record.service()] = record;
  in_sight_ = true;
  since_ = clock_.Now();
}

void Members::Put(const std::string& service, const v1::ServiceRecord& record) {
  MutexLock lock(&mutex_);
  here_[service] = record;
  left_.erase(service);
}

void Members::Remove(const std::string& service) {
  constexpr size_t kMaxLeft = 1024;
  MutexLock lock(&mutex_);
  here_.erase(service);
  if (left_.size() < kMaxLeft) left_[service] = clock_.Now();
}

void Members::LoseSight() {
  MutexLock lock(&mutex_);
  in_sight_ = false;
}

absl::Time Members::MissingSinceLocked(const std::string& service) const {
  if (!in_sight_ || here_.contains(service)) return absl::InfiniteFuture();
  const auto left = left_.find(service);
  return left == left_.end() ? since_ : left->second;
}

absl::Time Members::MissingSince(const std::string& service) const {
  MutexLock lock(&mutex_);
  return MissingSinceLocked(service);
}

Members::Presence Members::Of(const std::string& service) const {
  MutexLock lock(&mutex_);
  if (!in_sight_) return Presence::kUnknown;
  if (here_.contains(service)) return Presence::kHere;
  const bool gone = clock_.Now() >= MissingSinceLocked(service) + grace_;
  return gone ? Presence::kGone : Presence::kMissing;
}

int Members::size() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(here_.size());
}

}  // namespace heavywater
