// Quotas that operators have set for tenants: checked, and kept for a restart.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/state_store.h"
#include "cache_service/tier/tenant_book.h"
#include "heavywater/v1/admin.pb.h"

namespace heavywater {

inline constexpr size_t kMaxTenantQuotas = 10'000;

// Of the account, for people.
v1::TenantStats DescribeTenant(const TenantEntry& entry);
// Those with limits of their own first, then those that hold most: as many as people can look
// at (256); how many were left out.
std::vector<TenantEntry> ShownTenants(const TenantBook& book, int64_t* left_out);

// Thread safe.
class TenantQuotas {
 public:
  // Both must outlive it; `state` may be null.
  TenantQuotas(TenantBook& book, StateStore* state) : book_(book), state_(state) {}

  // After a restart. DATA_LOSS.
  absl::Status Restore();
  // As AdminService.SetQuota says; kept before it returns.
  absl::StatusOr<v1::SetQuotaResponse> Set(const v1::SetQuotaRequest& request);

 private:
  TenantBook& book_;
  StateStore* const state_;
  Mutex mutex_;  // changes take effect in the order in which they are kept
  std::map<std::string, TenantLimits> own_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
