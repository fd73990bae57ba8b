// Prometheus families of a cache service among several.
#pragma once

#include <prometheus/collectable.h>

#include <memory>
#include <utility>
#include <vector>

#include "cache_service/cluster/cluster.h"

namespace heavywater {

// Thread safe.
class ClusterMetrics final : public prometheus::Collectable {
 public:
  // Empty once the cluster has ended.
  explicit ClusterMetrics(std::weak_ptr<const Cluster> cluster) : cluster_(std::move(cluster)) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::weak_ptr<const Cluster> cluster_;
};

}  // namespace heavywater
