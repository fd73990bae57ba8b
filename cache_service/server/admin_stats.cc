#include "cache_service/server/admin_stats.h"

#include "cache_service/base/version.h"
#include "cache_service/registry/tenant_quotas.h"

namespace heavywater {

namespace {

void AddHost(const PageStoreStats& stats, v1::StatsResponse& response) {
  v1::TierStats& host = *response.add_tiers();
  host.set_tier("host");
  host.set_total_bytes(stats.total_bytes);
  host.set_used_bytes(stats.used_bytes);
  host.set_free_bytes(stats.free_bytes);
  host.set_pages(stats.pages);
  host.set_reservations_refused(stats.reservations_refused);
  host.set_hits(stats.host_hits());
  host.set_moved_down(stats.moved_down);
  host.set_failures_corrupt(stats.checksum_failures);
}

void AddBelow(const TierStats& stats, v1::StatsResponse& response) {
  v1::TierStats& tier = *response.add_tiers();
  tier.set_tier(stats.tier);
  tier.set_total_bytes(stats.total_bytes);
  tier.set_used_bytes(stats.used_bytes);
  tier.set_free_bytes(stats.free_bytes);
  tier.set_pages(stats.pages);
  tier.set_hits(stats.hits);
  tier.set_moved_in(stats.moved_in);
  tier.set_moved_down(stats.moved_down);
  tier.set_moved_up(stats.moved_up);
  tier.set_failures_full(stats.failures.full);
  tier.set_failures_unavailable(stats.failures.unavailable);
  tier.set_failures_corrupt(stats.failures.corrupt);
  tier.set_failures_missing(stats.failures.missing);
  tier.set_failures_other(stats.failures.other);
}

}  // namespace

void AdminStats::AddTenants(v1::StatsResponse* response) const {
  int64_t left_out = 0;
  for (const TenantEntry& entry : ShownTenants(store_.tenants(), &left_out)) {
    *response->add_tenants() = DescribeTenant(entry);
  }
  response->set_tenants_left_out(left_out);
  response->set_quota_refusals(store_.tenants().num_refused());
}

v1::StatsResponse AdminStats::Collect() const {
  v1::StatsResponse response;
  response.set_version(kVersion);
  response.set_uptime_ms(absl::ToInt64Milliseconds(clock_.Now() - start_));
  response.set_sequences(registry_.sequences().num_sequences());
  response.set_groups(registry_.groups().num_groups());
  response.set_ranks(registry_.groups().num_ranks());
  const BlobStoreStats held = blobs_.Stats();
  response.set_blobs(held.blobs);
  response.set_blob_bytes(held.held_bytes);
  const SequenceRegistry::Pinned pinned = registry_.sequences().CountPinned();
  response.set_pins(pinned.pins);
  response.set_pinned_sequences(pinned.sequences);
  response.set_pinned_bytes(pinned.host_bytes);
  AddTenants(&response);
  v1::DrainState drain;
  if (drainer_.Describe(&drain)) *response.mutable_drain() = drain;
  const PageStoreStats stats = store_.Stats();
  AddHost(stats, response);
  for (const TierStats& tier : stats.below) AddBelow(tier, response);
  return response;
}

}  // namespace heavywater
