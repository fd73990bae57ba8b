#include "worker/server/worker_config.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/runtime/server_security.h"
#include "cache_service/security/address.h"
#include "worker/cache/kv_layout.h"
#include "worker/cache/sketch_shape.h"
#include "worker/server/engine_facts.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

absl::Status CheckRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want ", low, " to ", high));
}

absl::Status CheckOneOf(const char* field, const std::string& got,
                        std::initializer_list<const char*> names) {
  std::string want;
  for (const char* name : names) {
    if (got == name) return absl::OkStatus();
    absl::StrAppend(&want, want.empty() ? "" : ", ", name);
  }
  return absl::InvalidArgumentError(absl::StrCat(field, " is \"", got, "\", want one of ", want));
}

absl::Status CheckNumbers(const v1::WorkerConfig& config) {
  constexpr int64_t kDay = 86'400'000;
  HW_RETURN_IF_ERROR(CheckRange("size", config.size(), 1, 1024));
  HW_RETURN_IF_ERROR(CheckRange("rank", config.rank(), 0, config.size() - 1));
  HW_RETURN_IF_ERROR(CheckRange("comm_timeout_ms", config.comm_timeout_ms(), 100, kDay));
  HW_RETURN_IF_ERROR(CheckRange("peer_timeout_ms", config.peer_timeout_ms(), 300, kDay));
  HW_RETURN_IF_ERROR(
      CheckRange("device_memory_bytes", config.device_memory_bytes(), 1, int64_t{1} << 50));
  HW_RETURN_IF_ERROR(CheckRange("page_tokens", config.page_tokens(), 1, 65536));
  HW_RETURN_IF_ERROR(CheckRange("compute_threads", config.compute_threads(), 1, 1024));
  HW_RETURN_IF_ERROR(CheckRange("prompt_chunk_tokens", config.prompt_chunk_tokens(), 1, 65536));
  HW_RETURN_IF_ERROR(CheckRange("reserve_ahead_tokens", config.reserve_ahead_tokens(), 0, 1 << 24));
  // A step's rows share the workspace of a prompt's chunk.
  HW_RETURN_IF_ERROR(CheckRange("max_batch", config.max_batch(), 1, config.prompt_chunk_tokens()));
  HW_RETURN_IF_ERROR(CheckRange("max_queued", config.max_queued(), 1, 1 << 20));
  HW_RETURN_IF_ERROR(CheckRange("max_stall_ms", config.max_stall_ms(), 0, kDay));
  HW_RETURN_IF_ERROR(CheckRange("client_stall_ms", config.client_stall_ms(), 1, kDay));
  HW_RETURN_IF_ERROR(CheckRange("reform_timeout_ms", config.reform_timeout_ms(), 0, kDay));
  HW_RETURN_IF_ERROR(
      CheckRange("snapshot_interval_tokens", config.snapshot_interval_tokens(), 0, 1 << 24));
  HW_RETURN_IF_ERROR(
      CheckRange("report_interval_plans", config.report_interval_plans(), 1, 1 << 30));
  return CheckRange("drain_ms", config.drain_ms(), 0, kDay);
}

// Whether the device is there is for the backend to say.
absl::Status CheckDevice(const v1::WorkerConfig& config) {
  HW_RETURN_IF_ERROR(CheckOneOf("backend", config.backend(), {"cpu", "reference", "cuda"}));
  HW_RETURN_IF_ERROR(CheckOneOf("communicator", config.communicator(), {"auto", "gloo", "nccl"}));
  HW_RETURN_IF_ERROR(CheckRange("device", config.device(), 0, 1023));
  HW_RETURN_IF_ERROR(CheckOneOf("weights_dtype", config.weights_dtype(), {"bf16", "fp32"}));
  const bool uses_nccl = config.communicator() == "nccl";
  if (uses_nccl && config.backend() != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("communicator is \"nccl\" and backend is \"",
                                                   config.backend(), "\", want backend cuda"));
  }
  if (uses_nccl && config.allow_shared_device()) {
    return absl::InvalidArgumentError(
        "communicator is \"nccl\" and allow_shared_device is set; NCCL wants a GPU for each rank, "
        "want communicator auto or gloo");
  }
  return absl::OkStatus();
}

// What can be said before the model is known.
absl::Status CheckDefaultPolicy(const v1::WorkerConfig& config) {
  const absl::StatusOr<PolicyOptions> preset = Preset(config.default_policy());
  if (!preset.ok()) {
    return absl::Status(preset.status().code(),
                        absl::StrCat("default_policy: ", preset.status().message()));
  }
  if (!preset->recall.enabled) return absl::OkStatus();
  if (config.cache_address().empty()) {
    return absl::InvalidArgumentError(
        "cache_address is empty and default_policy has recall, want the address of the "
        "heavywater-cache that keeps demoted positions");
  }
  if (config.page_tokens() % kSketchBlock == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("page_tokens is ", config.page_tokens(),
                   " and default_policy has recall, want a multiple of ", kSketchBlock));
}

// What every machine listens on says nothing about where this one is.
absl::Status CheckAdvertisedAddress(const v1::WorkerConfig& config) {
  const std::string& address =
      config.advertised_address().empty() ? config.listen_address() : config.advertised_address();
  const std::string host = address.substr(0, address.rfind(':'));
  const bool is_any = host.empty() || host == "0.0.0.0" || host == "[::]" || host == "*";
  if (config.size() == 1 || !is_any) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "advertised_address is \"", config.advertised_address(), "\" and listen_address is \"",
      config.listen_address(), "\", want the HOST:PORT where the other ranks reach this one"));
}

absl::Status CheckSecurity(const v1::WorkerConfig& config) {
  HW_RETURN_IF_ERROR(CheckSecurityConfig(config));
  HW_RETURN_IF_ERROR(CheckRange("max_connections", config.max_connections(), 1, 1'000'000));
  HW_RETURN_IF_ERROR(
      CheckRange("max_connections_per_peer", config.max_connections_per_peer(), 0, 1'000'000));
  HW_RETURN_IF_ERROR(
      CheckRange("max_calls_per_connection", config.max_calls_per_connection(), 1, 1'000'000));
  if (config.token_file().empty() || !config.tls_ca_file().empty()) return absl::OkStatus();
  for (const std::string& address : CacheAddressesOf(config)) {
    if (IsLoopback(address)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token_file is set and the token would go to cache_address ", address,
                     " in plaintext, want tls_ca_file"));
  }
  return absl::OkStatus();
}

constexpr size_t kMaxCacheServices = 64;

absl::Status CheckCacheAddresses(const v1::WorkerConfig& config) {
  std::vector<std::string> addresses = CacheAddressesOf(config);
  const size_t given = addresses.size();
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  const bool has_empty = !addresses.empty() && addresses.front().empty();
  if (given <= kMaxCacheServices && addresses.size() == given && !has_empty) {
    return CheckRange("cache_failover_ms", config.cache_failover_ms(), 1000, 86'400'000);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "cache_address is \"", config.cache_address(), "\", want one HOST:PORT, or up to ",
      kMaxCacheServices, " different ones with a comma between two"));
}

}  // namespace

v1::WorkerConfig DefaultWorkerConfig() {
  v1::WorkerConfig config;
  config.set_group("default");
  config.set_size(1);
  config.set_listen_address("127.0.0.1:0");
  config.set_comm_address("127.0.0.1");
  config.set_comm_timeout_ms(30'000);
  config.set_peer_timeout_ms(3000);
  config.set_device_memory_bytes(int64_t{1} << 30);
  config.set_kv_dtype("bf16");
  config.set_page_tokens(256);
  config.set_backend("cpu");
  config.set_cpu_target("best");
  config.set_compute_threads(1);
  config.set_prompt_chunk_tokens(512);
  config.set_reserve_ahead_tokens(1024);
  config.set_on_host_full("stop");
  config.set_max_batch(64);
  config.set_max_queued(256);
  config.set_max_stall_ms(50);
  config.set_client_stall_ms(60'000);
  config.set_default_policy("snapkv_h2o");
  config.set_report_interval_plans(16);
  config.set_drain_ms(5000);
  config.set_reform_timeout_ms(600'000);
  config.set_snapshot_interval_tokens(64);
  config.set_rest_pages(true);
  config.set_communicator("auto");
  config.set_weights_dtype("bf16");
  config.set_log_level("info");
  config.set_security_reload_ms(10'000);
  config.set_max_connections(10'000);
  config.set_max_calls_per_connection(1'000);
  config.set_cache_failover_ms(60'000);
  return config;
}

absl::Status CheckWorkerConfig(const v1::WorkerConfig& config) {
  HW_RETURN_IF_ERROR(CheckNumbers(config));
  HW_RETURN_IF_ERROR(CheckSecurity(config));
  HW_RETURN_IF_ERROR(CheckCacheAddresses(config));
  HW_RETURN_IF_ERROR(CheckOneOf("kv_dtype", config.kv_dtype(), {"fp32", "bf16", "fp16"}));
  HW_RETURN_IF_ERROR(CheckDevice(config));
  HW_RETURN_IF_ERROR(CheckOneOf("cpu_target", config.cpu_target(), {"best", "avx2", "avx512"}));
  HW_RETURN_IF_ERROR(CheckOneOf("on_host_full", config.on_host_full(), {"stop", "drop"}));
  HW_RETURN_IF_ERROR(CheckDefaultPolicy(config));
  if (config.group().empty()) return absl::InvalidArgumentError("group is empty, want a name");
  if (config.model().empty()) {
    return absl::InvalidArgumentError(
        "model is empty, want the path of a GGUF file or of a folder with config.json and "
        "safetensors, or none for engines that bring Q, K and V");
  }
  HW_RETURN_IF_ERROR(CheckEngineConfig(config));
  HW_RETURN_IF_ERROR(CheckAdvertisedAddress(config));
  if (config.prefix_reuse() && config.cache_address().empty()) {
    return absl::InvalidArgumentError(
        "prefix_reuse is true and cache_address is empty, want the address of the "
        "heavywater-cache that keeps the pages");
  }
  if (config.size() > 1 && config.cache_address().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_address is empty and size is ", config.size(),
                     ", want the address of heavywater-cache, where ranks meet"));
  }
  return absl::OkStatus();
}

std::vector<std::string> CacheAddressesOf(const v1::WorkerConfig& config) {
  if (config.cache_address().empty()) return {};
  return absl::StrSplit(config.cache_address(), ',');
}

ChannelSecurity ChannelSecurityOf(const v1::WorkerConfig& config) {
  const bool tls = !config.tls_ca_file().empty();
  return {.ca_file = config.tls_ca_file(),
          .cert_file = tls ? config.tls_cert_file() : "",
          .key_file = tls ? config.tls_key_file() : "",
          .server_name = config.tls_server_name(),
          .token_file = config.token_file(),
          .reload_interval = absl::Milliseconds(config.security_reload_ms())};
}

std::string ConfigDigest(const v1::WorkerConfig& config) {
  const std::string text = absl::StrCat(
      "version ", kVersion, "; size ", config.size(), "; kv_dtype ", config.kv_dtype(),
      "; page_tokens ", config.page_tokens(), "; device_memory_bytes ",
      config.device_memory_bytes(), "; prompt_chunk_tokens ", config.prompt_chunk_tokens(),
      "; backend ", config.backend(), "; communicator ", config.communicator(),
      "; allow_shared_device ", config.allow_shared_device() ? "yes" : "no", "; weights_dtype ",
      config.weights_dtype(), "; on_host_full ", config.on_host_full(), "; cache ",
      config.cache_address().empty() ? "no" : "yes", "; rest_pages ",
      config.rest_pages() ? "yes" : "no", "; engine_query_heads ", config.engine_query_heads(),
      "; engine_attention_scale ", config.engine_attention_scale());
  return absl::StrCat(absl::Hex(Crc32c(std::as_bytes(std::span(text))), absl::kZeroPad8), " ",
                      text);
}

}  // namespace heavywater
