#include "cache_service/tier/tenant_book.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/shortage.h"

namespace heavywater {
namespace {

constexpr absl::Duration kRetryAfter = absl::Seconds(1);
// "tenant:NAME/WHAT"
constexpr char kSubject[] = "tenant:";

bool Fits(int64_t more, int64_t used, int64_t limit) {
  return limit == 0 || more <= 0 || more <= limit - used;
}

bool IsNone(const TenantUse& use) {
  return use.host_bytes == 0 && use.lower_bytes == 0 && use.sequences == 0;
}

void Add(const TenantUse& delta, TenantUse& used) {
  used.host_bytes += delta.host_bytes;
  used.lower_bytes += delta.lower_bytes;
  used.sequences += delta.sequences;
  HW_CHECK(used.host_bytes >= 0 && used.lower_bytes >= 0 && used.sequences >= 0);
}

}  // namespace

std::optional<TenantShortage> TenantShortageOf(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return std::nullopt;
  const std::optional<Shortage> shortage = ShortageOf(status);
  if (!shortage.has_value() || shortage->subject.rfind(kSubject, 0) != 0) return std::nullopt;
  const size_t slash = shortage->subject.rfind('/');
  if (slash == std::string::npos) return std::nullopt;
  const size_t begin = sizeof(kSubject) - 1;
  return TenantShortage{shortage->subject.substr(begin, slash - begin),
                        shortage->subject.substr(slash + 1)};
}

void TenantBook::SetDefaults(const TenantLimits& defaults) {
  MutexLock lock(&mutex_);
  defaults_ = defaults;
}

void TenantBook::SetLimits(const std::string& tenant, const std::optional<TenantLimits>& limits) {
  MutexLock lock(&mutex_);
  accounts_[tenant].limits = limits;
  ForgetIfEmpty(tenant);
}

TenantLimits TenantBook::LimitsOf(const Account& account) const {
  return account.limits.value_or(defaults_);
}

void TenantBook::ForgetIfEmpty(const std::string& tenant) {
  const auto found = accounts_.find(tenant);
  if (IsNone(found->second.used) && !found->second.limits.has_value()) accounts_.erase(found);
}

absl::Status TenantBook::Refuse(const std::string& tenant, const char* what, int64_t need,
                                int64_t used, int64_t limit) {
  ++num_refused_;
  ForgetIfEmpty(tenant);
  const int64_t available = std::max<int64_t>(0, limit - used);
  return ExhaustedError(absl::StrCat("tenant \"", tenant, "\": need ", need, " more of its quota ",
                                     what, ", ", available, " of ", limit, " are left"),
                        {.subject = absl::StrCat(kSubject, tenant, "/", what),
                         .need = need,
                         .available = available,
                         .limit = limit,
                         .retry_after = need <= limit ? kRetryAfter : absl::InfiniteDuration()});
}

absl::Status TenantBook::TryHold(const std::string& tenant, const TenantUse& more) {
  MutexLock lock(&mutex_);
  Account& account = accounts_[tenant];
  const TenantLimits limits = LimitsOf(account);
  const TenantUse& used = account.used;
  // What would not fit an empty account is said first: for the rest its own sequences make room.
  if (!Fits(more.host_bytes, 0, limits.host_bytes)) {
    return Refuse(tenant, "host_bytes", more.host_bytes, used.host_bytes, limits.host_bytes);
  }
  if (!Fits(more.sequences, used.sequences, limits.sequences)) {
    return Refuse(tenant, "sequences", more.sequences, used.sequences, limits.sequences);
  }
  if (!Fits(more.host_bytes, used.host_bytes, limits.host_bytes)) {
    return Refuse(tenant, "host_bytes", more.host_bytes, used.host_bytes, limits.host_bytes);
  }
  if (!Fits(more.lower_bytes, used.lower_bytes, limits.lower_bytes)) {
    return Refuse(tenant, "lower_bytes", more.lower_bytes, used.lower_bytes, limits.lower_bytes);
  }
  Add(more, account.used);
  ForgetIfEmpty(tenant);
  return absl::OkStatus();
}

void TenantBook::Change(const std::string& tenant, const TenantUse& delta) {
  if (IsNone(delta)) return;
  MutexLock lock(&mutex_);
  Add(delta, accounts_[tenant].used);
  ForgetIfEmpty(tenant);
}

int64_t TenantBook::LowerRoom(const std::string& tenant) const {
  const TenantEntry entry = Find(tenant);
  if (entry.limits.lower_bytes == 0) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(0, entry.limits.lower_bytes - entry.used.lower_bytes);
}

TenantEntry TenantBook::Find(const std::string& tenant) const {
  MutexLock lock(&mutex_);
  const auto found = accounts_.find(tenant);
  const Account account = found == accounts_.end() ? Account() : found->second;
  return {tenant, account.used, LimitsOf(account), account.limits.has_value()};
}

std::vector<TenantEntry> TenantBook::List() const {
  std::vector<TenantEntry> entries;
  MutexLock lock(&mutex_);
  for (const auto& [tenant, account] : accounts_) {
    entries.push_back({tenant, account.used, LimitsOf(account), account.limits.has_value()});
  }
  return entries;
}

int64_t TenantBook::num_refused() const {
  MutexLock lock(&mutex_);
  return num_refused_;
}

}  // namespace heavywater
