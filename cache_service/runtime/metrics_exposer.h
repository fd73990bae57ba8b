// The Prometheus endpoint over HTTP.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace heavywater {

// Thread safe, except for the destructor.
class MetricsExposer {
 public:
  // Serves /metrics at host:port; port 0 picks one. UNAVAILABLE naming an address
  // that cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsExposer>> Start(const std::string& address);
  ~MetricsExposer();
  MetricsExposer(const MetricsExposer&) = delete;
  MetricsExposer& operator=(const MetricsExposer&) = delete;

  void Add(std::shared_ptr<prometheus::Collectable> collectable);
  const std::string& address() const { return address_; }  // with the real port

 private:
  MetricsExposer(std::unique_ptr<prometheus::Exposer> exposer, std::string address);

  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string address_;
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;  // the exposer's are weak
};

}  // namespace heavywater
