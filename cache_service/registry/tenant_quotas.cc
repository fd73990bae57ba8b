#include "cache_service/registry/tenant_quotas.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/validate.h"
#include "heavywater/v1/cache_state.pb.h"

namespace heavywater {
namespace {

constexpr size_t kMaxTenantsShown = 256;

void SetQuota(const TenantUse& use, v1::TenantQuota* quota) {
  quota->set_host_bytes(use.host_bytes);
  quota->set_lower_bytes(use.lower_bytes);
  quota->set_sequences(use.sequences);
}

absl::Status CheckQuota(const v1::SetQuotaRequest& request) {
  HW_RETURN_IF_ERROR(CheckText("tenant", request.tenant(), 0, kMaxNameBytes));
  const v1::TenantQuota& quota = request.quota();
  if (request.use_default()) {
    if (!request.has_quota()) return absl::OkStatus();
    return absl::InvalidArgumentError("quota is set with use_default, want one of the two");
  }
  if (!request.has_quota()) {
    return absl::InvalidArgumentError("quota is missing, want one, or use_default");
  }
  HW_RETURN_IF_ERROR(CheckInt("quota.host_bytes", quota.host_bytes(), 0, kMaxQuotaBytes));
  HW_RETURN_IF_ERROR(CheckInt("quota.lower_bytes", quota.lower_bytes(), 0, kMaxQuotaBytes));
  return CheckInt("quota.sequences", quota.sequences(), 0, kMaxQuotaSequences);
}

}  // namespace

v1::TenantStats DescribeTenant(const TenantEntry& entry) {
  v1::TenantStats stats;
  stats.set_tenant(entry.tenant);
  SetQuota(entry.used, stats.mutable_used());
  SetQuota(entry.limits, stats.mutable_quota());
  stats.set_own_quota(entry.own_limits);
  return stats;
}

std::vector<TenantEntry> ShownTenants(const TenantBook& book, int64_t* left_out) {
  std::vector<TenantEntry> tenants = book.List();
  const auto rank = [](const TenantEntry& entry) {
    return std::tuple(!entry.own_limits, -(entry.used.host_bytes + entry.used.lower_bytes));
  };
  std::stable_sort(
      tenants.begin(), tenants.end(),
      [&rank](const TenantEntry& a, const TenantEntry& b) { return rank(a) < rank(b); });
  const size_t shown = std::min(kMaxTenantsShown, tenants.size());
  *left_out = static_cast<int64_t>(tenants.size() - shown);
  tenants.resize(shown);
  return tenants;
}

absl::Status TenantQuotas::Restore() {
  MutexLock lock(&mutex_);
  return state_->ForEach(
      StateKey(StateKind::kQuota),
      [this](std::string_view, std::string_view value)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
            v1::QuotaState message;
            if (!message.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
              return absl::DataLossError("the state of a tenant's quota is damaged");
            }
            const TenantLimits limits = {.host_bytes = message.host_bytes(),
                                         .lower_bytes = message.lower_bytes(),
                                         .sequences = message.sequences()};
            own_[message.tenant()] = limits;
            book_.SetLimits(message.tenant(), limits);
            return absl::OkStatus();
          });
}

absl::StatusOr<v1::SetQuotaResponse> TenantQuotas::Set(const v1::SetQuotaRequest& request) {
  HW_RETURN_IF_ERROR(CheckQuota(request));
  const std::string& tenant = request.tenant();
  std::optional<TenantLimits> limits;
  if (!request.use_default()) {
    limits = {.host_bytes = request.quota().host_bytes(),
              .lower_bytes = request.quota().lower_bytes(),
              .sequences = request.quota().sequences()};
  }
  MutexLock lock(&mutex_);
  if (limits.has_value() && !own_.contains(tenant) && own_.size() >= kMaxTenantQuotas) {
    return ExhaustedError(absl::StrCat("there are quotas of ", own_.size(),
                                       " tenants already, the limit is ", kMaxTenantQuotas),
                          {.subject = "tenant quotas", .need = 1, .limit = kMaxTenantQuotas});
  }
  if (limits.has_value()) {
    own_[tenant] = *limits;
  } else {
    own_.erase(tenant);
  }
  if (state_ != nullptr) {
    StateBatch batch;
    const std::string key = StateKey(StateKind::kQuota, tenant);
    if (limits.has_value()) {
      v1::QuotaState message;
      message.set_tenant(tenant);
      message.set_host_bytes(limits->host_bytes);
      message.set_lower_bytes(limits->lower_bytes);
      message.set_sequences(limits->sequences);
      batch.Put(key, message.SerializeAsString());
    } else {
      batch.Delete(key);
    }
    state_->Apply(batch);
  }
  book_.SetLimits(tenant, limits);
  v1::SetQuotaResponse response;
  *response.mutable_tenant() = DescribeTenant(book_.Find(tenant));
  return response;
}

}  // namespace heavywater
