// The service's side of a deployment with several cache services: from the configuration to
// a Cluster, if there is to be one.
#pragma once

#include <prometheus/collectable.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/viewer.h"
#include "cache_service/registry/registry.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/tier/ordered_page_store.h"
#include "heavywater/v1/config.pb.h"

namespace heavywater {

class Cluster;

// Looks for a sequence that is not here, as Cluster::Bring() says. Null: there is nowhere to look.
using BringSequence = std::function<void(SequenceId id, const Viewer& viewer,
                                         std::function<void(const absl::Status&)> done)>;

// Thread safe after Start().
class ClusterLink {
 public:
  // Without etcd_endpoints one that does nothing. `service`: a name that a restart with a state
  // keeps. INVALID_ARGUMENT naming the field.
  static absl::StatusOr<std::unique_ptr<ClusterLink>> Open(const v1::CacheConfig& config,
                                                           const std::string& service);
  ~ClusterLink();

  void AddTo(RegistryOptions& options) const;
  BringSequence bring() const;
  // `address`: that was bound.
  void Start(const std::string& address, Registry& registry, OrderedPageStore& store, Clock& clock);
  // When the server drains: what others need is written, at most for so long.
  void Flush(absl::Duration limit);
  // Before what Start() was given ends.
  void Stop();
  // Null: there are no others.
  std::shared_ptr<prometheus::Collectable> metrics() const { return metrics_; }

 private:
  ClusterLink(std::string advertised_address, std::shared_ptr<Cluster> cluster);

  const std::string advertised_address_;
  const std::shared_ptr<Cluster> cluster_;  // null: none
  std::shared_ptr<prometheus::Collectable> metrics_;
};

}  // namespace heavywater
