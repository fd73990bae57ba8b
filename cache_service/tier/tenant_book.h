// What each tenant holds of the tiers, and how much it may.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

struct TenantUse {
  int64_t host_bytes = 0;   // of pages in the slab, and room held for admitted prompts
  int64_t lower_bytes = 0;  // of pages in the tiers below
  int64_t sequences = 0;
};

// As TenantUse; 0: no limit.
using TenantLimits = TenantUse;

struct TenantEntry {
  std::string tenant;
  TenantUse used = {};
  TenantLimits limits = {};
  bool own_limits = false;  // SetLimits(), not the default
};

// Whose quota refused something: RESOURCE_EXHAUSTED of TenantBook carries it (base/shortage.h).
struct TenantShortage {
  std::string tenant;
  std::string what;  // "host_bytes", "lower_bytes" or "sequences"
};
// None where the status is another's.
std::optional<TenantShortage> TenantShortageOf(const absl::Status& status);

// Thread safe. Tenants are there while they hold something or have limits of their own, so
// their number is bounded by what is held.
class TenantBook {
 public:
  void SetDefaults(const TenantLimits& defaults);
  // None: the default again. What is held already stays.
  void SetLimits(const std::string& tenant, const std::optional<TenantLimits>& limits);

  // All of `more`, or nothing: RESOURCE_EXHAUSTED naming tenant, need and limit, counted.
  absl::Status TryHold(const std::string& tenant, const TenantUse& more);
  // As it is: checks no limit. What is held never falls below zero (a CHECK).
  void Change(const std::string& tenant, const TenantUse& delta);
  // What may still come to the tiers below.
  int64_t LowerRoom(const std::string& tenant) const;

  TenantEntry Find(const std::string& tenant) const;
  // In the order of their names.
  std::vector<TenantEntry> List() const;
  int64_t num_refused() const;

 private:
  struct Account {
    TenantUse used = {};
    std::optional<TenantLimits> limits = std::nullopt;
  };
  TenantLimits LimitsOf(const Account& account) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refuse(const std::string& tenant, const char* what, int64_t need, int64_t used,
                      int64_t limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetIfEmpty(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  TenantLimits defaults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mutex_);
  int64_t num_refused_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace heavywater
