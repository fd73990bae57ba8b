#include "cache_service/server/admin_service.h"

#include <utility>

#include "cache_service/base/version.h"
#include "cache_service/server/unary.h"

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

v1::StatsResponse CollectStats(Registry& registry, const PageStore& store, const BlobStore& blobs) {
  v1::StatsResponse response;
  response.set_version(kVersion);
  response.set_sequences(registry.sequences().num_sequences());
  response.set_groups(registry.groups().num_groups());
  response.set_ranks(registry.groups().num_ranks());
  const BlobStoreStats held = blobs.Stats();
  response.set_blobs(held.blobs);
  response.set_blob_bytes(held.held_bytes);
  const PageStoreStats stats = store.Stats();
  AddHost(stats, response);
  for (const TierStats& tier : stats.below) AddBelow(tier, response);
  return response;
}

AdminService::AdminService(Registry& registry, const PageStore& store, const BlobStore& blobs,
                           Clock& clock, std::string config_yaml)
    : registry_(registry),
      store_(store),
      blobs_(blobs),
      clock_(clock),
      config_yaml_(std::move(config_yaml)),
      start_(clock.Now()) {}

grpc::ServerUnaryReactor* AdminService::Stats(grpc::CallbackServerContext* context,
                                              const v1::StatsRequest*,
                                              v1::StatsResponse* response) {
  *response = CollectStats(registry_, store_, blobs_);
  response->set_uptime_ms(absl::ToInt64Milliseconds(clock_.Now() - start_));
  return Finish(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetConfig(grpc::CallbackServerContext* context,
                                                  const v1::GetConfigRequest*,
                                                  v1::GetConfigResponse* response) {
  response->set_yaml(config_yaml_);
  return Finish(context, absl::OkStatus());
}

}  // namespace heavywater
