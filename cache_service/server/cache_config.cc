#include "cache_service/server/cache_config.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/validate.h"
#include "cache_service/runtime/server_security.h"
#include "cache_service/security/address.h"
#include "cache_service/tier/slab_format.h"

namespace heavywater {

v1::CacheConfig DefaultCacheConfig() {
  v1::CacheConfig config;
  config.set_listen_address("127.0.0.1:7700");
  config.set_metrics_address("127.0.0.1:0");
  config.set_host_bytes(int64_t{1} << 30);
  config.set_sequence_lease_ms(60'000);
  config.set_rank_lease_ms(5'000);
  config.set_suspend_ttl_ms(3'600'000);
  config.set_max_sequences(10'000);
  config.set_max_groups(64);
  config.set_drain_ms(5'000);
  config.set_log_level("info");
  config.set_disk_bytes(int64_t{16} << 30);
  config.set_redis_bytes(int64_t{16} << 30);
  config.set_redis_timeout_ms(1'000);
  config.set_redis_ttl_ms(kMaxLeaseMs);
  config.set_tier_high_percent(90);
  config.set_tier_low_percent(75);
  config.set_security_reload_ms(10'000);
  config.set_max_connections(10'000);
  config.set_max_calls_per_connection(1'000);
  config.set_etcd_prefix("/heavywater");
  config.set_etcd_lease_ms(10'000);
  config.set_etcd_takeover_ms(5'000);
  config.set_remote_copy("suspended");
  config.set_remote_copy_bytes(int64_t{16} << 30);
  config.set_max_pins(1024);
  config.set_blob_stall_ms(30'000);
  config.set_demoted_dtype("exact");
  return config;
}

namespace {

constexpr size_t kMaxPathBytes = 4096;
constexpr int64_t kMaxBlobBytesOfAll = int64_t{1} << 50;

// Of what needs no file to be read: that is done at the start.
absl::Status ValidateRedis(const v1::CacheConfig& config) {
  const std::pair<const char*, const std::string*> texts[] = {
      {"redis_username", &config.redis_username()},
      {"redis_password_file", &config.redis_password_file()},
      {"redis_ca_file", &config.redis_ca_file()},
      {"redis_server_name", &config.redis_server_name()},
      {"redis_cert_file", &config.redis_cert_file()},
      {"redis_key_file", &config.redis_key_file()}};
  for (const auto& [field, value] : texts) {
    HW_RETURN_IF_ERROR(CheckText(field, *value, 0, kMaxPathBytes));
    if (!value->empty() && config.redis_address().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " is set and redis_address is not, want that, too"));
    }
  }
  const bool plaintext = config.redis_ca_file().empty() && !config.allow_plaintext();
  if (config.redis_password_file().empty() || !plaintext || IsLoopback(config.redis_address())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("redis_password_file would go to ", config.redis_address(),
                   " in plaintext, want redis_ca_file, an address of this machine, or "
                   "allow_plaintext: true"));
}

absl::Status ValidateTiers(const v1::CacheConfig& config) {
  constexpr int64_t kMinTierBytes = 1 << 20;
  constexpr int64_t kMaxTierBytes = int64_t{1} << 50;
  HW_RETURN_IF_ERROR(CheckText("disk_path", config.disk_path(), 0, kMaxPathBytes));
  HW_RETURN_IF_ERROR(CheckInt("disk_bytes", config.disk_bytes(), kMinTierBytes, kMaxTierBytes));
  HW_RETURN_IF_ERROR(CheckText("redis_address", config.redis_address(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(ValidateRedis(config));
  if (config.demoted_dtype() != "exact" && config.demoted_dtype() != "int8") {
    return absl::InvalidArgumentError(absl::StrCat("demoted_dtype is \"", config.demoted_dtype(),
                                                   "\", want \"exact\" or \"int8\""));
  }
  HW_RETURN_IF_ERROR(CheckInt("redis_bytes", config.redis_bytes(), kMinTierBytes, kMaxTierBytes));
  HW_RETURN_IF_ERROR(CheckInt("redis_timeout_ms", config.redis_timeout_ms(), 1, 60'000));
  HW_RETURN_IF_ERROR(
      CheckInt("redis_ttl_ms", config.redis_ttl_ms(), 1'000, int64_t{30} * 24 * 3'600'000));
  HW_RETURN_IF_ERROR(CheckInt("tier_high_percent", config.tier_high_percent(), 2, 100));
  return CheckInt("tier_low_percent", config.tier_low_percent(), 1, config.tier_high_percent() - 1);
}

absl::Status ValidateCluster(const v1::CacheConfig& config) {
  HW_RETURN_IF_ERROR(CheckText("etcd_endpoints", config.etcd_endpoints(), 0, kMaxPathBytes));
  HW_RETURN_IF_ERROR(CheckText("etcd_prefix", config.etcd_prefix(), 1, kMaxNameBytes));
  if (config.etcd_prefix().back() == '/') {
    return absl::InvalidArgumentError(absl::StrCat("etcd_prefix is \"", config.etcd_prefix(),
                                                   "\", want one that does not end with /"));
  }
  HW_RETURN_IF_ERROR(CheckInt("etcd_lease_ms", config.etcd_lease_ms(), 2'000, 3'600'000));
  HW_RETURN_IF_ERROR(CheckInt("etcd_takeover_ms", config.etcd_takeover_ms(), 2'000, 3'600'000));
  HW_RETURN_IF_ERROR(
      CheckText("advertised_address", config.advertised_address(), 0, kMaxPathBytes));
  HW_RETURN_IF_ERROR(
      CheckInt("remote_copy_bytes", config.remote_copy_bytes(), 0, int64_t{1} << 50));
  const std::string& copy = config.remote_copy();
  if (copy == "suspended" || copy == "finished" || copy == "none") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("remote_copy is \"", copy, "\", want \"suspended\", \"finished\" or \"none\""));
}

absl::Status ValidateTenants(const v1::CacheConfig& config) {
  HW_RETURN_IF_ERROR(CheckInt("tenant_host_bytes", config.tenant_host_bytes(), 0, kMaxQuotaBytes));
  HW_RETURN_IF_ERROR(
      CheckInt("tenant_lower_bytes", config.tenant_lower_bytes(), 0, kMaxQuotaBytes));
  HW_RETURN_IF_ERROR(
      CheckInt("tenant_sequences", config.tenant_sequences(), 0, kMaxQuotaSequences));
  HW_RETURN_IF_ERROR(CheckInt("max_pins", config.max_pins(), 0, 1'000'000));
  return CheckInt("blob_stall_ms", config.blob_stall_ms(), 1, 3'600'000);
}

}  // namespace

absl::Status ValidateCacheConfig(const v1::CacheConfig& config) {
  HW_RETURN_IF_ERROR(CheckSecurityConfig(config));
  HW_RETURN_IF_ERROR(CheckInt("max_connections", config.max_connections(), 1, 1'000'000));
  HW_RETURN_IF_ERROR(
      CheckInt("max_connections_per_peer", config.max_connections_per_peer(), 0, 1'000'000));
  HW_RETURN_IF_ERROR(
      CheckInt("max_calls_per_connection", config.max_calls_per_connection(), 1, 1'000'000));
  constexpr int64_t kMaxHostBytes = int64_t{1} << 46;
  HW_RETURN_IF_ERROR(CheckInt("host_bytes", config.host_bytes(), kSlabUnitBytes, kMaxHostBytes));
  HW_RETURN_IF_ERROR(CheckText("slab_name", config.slab_name(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("sequence_lease_ms", config.sequence_lease_ms(), 1, kMaxLeaseMs));
  HW_RETURN_IF_ERROR(CheckInt("rank_lease_ms", config.rank_lease_ms(), 1, kMaxLeaseMs));
  HW_RETURN_IF_ERROR(
      CheckInt("suspend_ttl_ms", config.suspend_ttl_ms(), 1, int64_t{30} * 24 * 3'600'000));
  HW_RETURN_IF_ERROR(CheckInt("max_sequences", config.max_sequences(), 1, 10'000'000));
  HW_RETURN_IF_ERROR(ValidateTiers(config));
  HW_RETURN_IF_ERROR(ValidateCluster(config));
  HW_RETURN_IF_ERROR(ValidateTenants(config));
  HW_RETURN_IF_ERROR(CheckText("state_dir", config.state_dir(), 0, kMaxPathBytes));
  if (!config.state_dir().empty() && config.disable_slab()) {
    return absl::InvalidArgumentError(
        "state_dir: pages outlive the process in a slab only, and disable_slab is set");
  }
  HW_RETURN_IF_ERROR(CheckInt("blob_bytes", config.blob_bytes(), 0, kMaxBlobBytesOfAll));
  HW_RETURN_IF_ERROR(CheckInt("max_groups", config.max_groups(), 1, 100'000));
  return CheckInt("drain_ms", config.drain_ms(), 0, 3'600'000);
}

}  // namespace heavywater
