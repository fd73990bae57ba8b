#include "cache_service/server/cluster_link.h"

#include <utility>

#ifdef HEAVYWATER_CLUSTER
#include "absl/strings/str_split.h"
#include "cache_service/base/status.h"
#include "cache_service/cluster/cluster.h"
#include "cache_service/server/cluster_metrics.h"
#else
#include "absl/strings/str_cat.h"
#endif

namespace heavywater {

#ifdef HEAVYWATER_CLUSTER

namespace {

ClusterOptions OptionsOf(const v1::CacheConfig& config, const std::string& service) {
  ClusterOptions options;
  options.etcd.endpoints = absl::StrSplit(config.etcd_endpoints(), ',');
  options.etcd.user = config.etcd_user();
  options.etcd.password_file = config.etcd_password_file();
  options.etcd.allow_plaintext = config.allow_plaintext();
  options.etcd.security.ca_file = config.etcd_ca_file();
  options.etcd.security.cert_file = config.etcd_cert_file();
  options.etcd.security.key_file = config.etcd_key_file();
  options.prefix = config.etcd_prefix();
  options.service = service;
  options.lease = absl::Milliseconds(config.etcd_lease_ms());
  options.takeover = absl::Milliseconds(config.etcd_takeover_ms());
  options.redis_address = config.redis_address();
  options.redis = {.timeout = absl::Milliseconds(config.redis_timeout_ms()),
                   .username = config.redis_username(),
                   .password_file = config.redis_password_file(),
                   .tls = {.ca_file = config.redis_ca_file(),
                           .server_name = config.redis_server_name(),
                           .cert_file = config.redis_cert_file(),
                           .key_file = config.redis_key_file()}};
  options.publisher.copies_finished = config.remote_copy() == "finished";
  options.publisher.copies_suspended =
      options.publisher.copies_finished || config.remote_copy() == "suspended";
  options.publisher.max_copy_bytes = config.remote_copy_bytes();
  options.publisher.copy_ttl = absl::Milliseconds(config.suspend_ttl_ms());
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClusterLink>> ClusterLink::Open(const v1::CacheConfig& config,
                                                               const std::string& service) {
  std::shared_ptr<Cluster> cluster;
  if (!config.etcd_endpoints().empty()) {
    HW_ASSIGN_OR_RETURN(cluster, Cluster::Create(OptionsOf(config, service)));
  }
  return std::unique_ptr<ClusterLink>(
      new ClusterLink(config.advertised_address(), std::move(cluster)));
}

ClusterLink::ClusterLink(std::string advertised_address, std::shared_ptr<Cluster> cluster)
    : advertised_address_(std::move(advertised_address)), cluster_(std::move(cluster)) {
  if (cluster_ != nullptr) metrics_ = std::make_shared<ClusterMetrics>(cluster_);
}

void ClusterLink::AddTo(RegistryOptions& options) const {
  if (cluster_ == nullptr) return;
  options.id_slot = static_cast<uint64_t>(cluster_->slot());
  options.id_stride = kMaxCacheServices;
  options.on_change = [&changes = cluster_->changes()](uint64_t id) { changes.Add(id); };
}

BringSequence ClusterLink::bring() const {
  if (cluster_ == nullptr) return nullptr;
  return [cluster = cluster_.get()](SequenceId id, const Viewer& viewer,
                                    std::function<void(const absl::Status&)> done) {
    cluster->Bring(id, viewer, std::move(done));
  };
}

void ClusterLink::Start(const std::string& address, Registry& registry, OrderedPageStore& store,
                        Clock& clock) {
  if (cluster_ == nullptr) return;
  cluster_->Start(advertised_address_.empty() ? address : advertised_address_, registry, store,
                  clock);
}

void ClusterLink::Flush(absl::Duration limit) {
  if (cluster_ != nullptr) cluster_->Flush(limit);
}

void ClusterLink::Stop() {
  if (cluster_ != nullptr) cluster_->Stop();
}

#else

absl::StatusOr<std::unique_ptr<ClusterLink>> ClusterLink::Open(const v1::CacheConfig& config,
                                                               const std::string&) {
  if (!config.etcd_endpoints().empty()) {
    return absl::InvalidArgumentError(
        "etcd_endpoints: this build knows no other cache services (hiredis)");
  }
  return std::unique_ptr<ClusterLink>(new ClusterLink("", nullptr));
}

ClusterLink::ClusterLink(std::string, std::shared_ptr<Cluster>) {}
void ClusterLink::AddTo(RegistryOptions&) const {}
BringSequence ClusterLink::bring() const { return nullptr; }
void ClusterLink::Start(const std::string&, Registry&, OrderedPageStore&, Clock&) {}
void ClusterLink::Flush(absl::Duration) {}
void ClusterLink::Stop() {}

#endif

ClusterLink::~ClusterLink() = default;

}  // namespace heavywater
