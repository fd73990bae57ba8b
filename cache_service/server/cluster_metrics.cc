#include "cache_service/server/cluster_metrics.h"

#include <prometheus/metric_family.h>

#include <string>

#include "absl/time/time.h"

namespace heavywater {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

struct Value {
  const char* label = nullptr;  // null: the family has one value
  double value = 0;
};

MetricFamily Family(MetricType type, const char* name, const char* help, const char* label,
                    const std::vector<Value>& values) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  for (const Value& value : values) {
    prometheus::ClientMetric& metric = family.metric.emplace_back();
    if (value.label != nullptr) metric.label.push_back({label, value.label});
    (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value.value;
  }
  return family;
}

MetricFamily Gauge(const char* name, const char* help, double value) {
  return Family(MetricType::Gauge, name, help, nullptr, {{nullptr, value}});
}

MetricFamily Counter(const char* name, const char* help, int64_t value) {
  return Family(MetricType::Counter, name, help, nullptr, {{nullptr, static_cast<double>(value)}});
}

}  // namespace

std::vector<MetricFamily> ClusterMetrics::Collect() const {
  const std::shared_ptr<const Cluster> cluster = cluster_.lock();
  if (cluster == nullptr) return {};
  const Cluster::Stats stats = cluster->stats();
  const Publisher::Stats& published = stats.published;
  return {
      Gauge("heavywater_etcd_up", "1 while etcd answers", stats.etcd_up ? 1 : 0),
      Gauge("heavywater_cluster_leader", "1 while this cache service cleans up after lost ones",
            stats.leader ? 1 : 0),
      Gauge("heavywater_cluster_services", "Cache services that are heard of", stats.services),
      Gauge("heavywater_cluster_pending_sequences",
            "Changed sequences that etcd, or their copy, does not know of yet",
            static_cast<double>(stats.pending)),
      Gauge("heavywater_cluster_lag_seconds", "How long the first of these has waited",
            absl::ToDoubleSeconds(stats.lag)),
      Family(MetricType::Counter, "heavywater_sequence_takeovers_total",
             "Sequences of lost cache services, by what became of the attempt", "result",
             {{"done", static_cast<double>(stats.takeovers)},
              {"failed", static_cast<double>(stats.takeovers_failed)}}),
      Counter("heavywater_sequences_given_up_total",
              "Sequences that ended here since another cache service had taken them over",
              published.given_up),
      Counter("heavywater_sequences_lost_total",
              "Sequences that were lost with their cache service, without a copy; counted by the "
              "leader",
              stats.lost),
      Counter("heavywater_cluster_cleaned_total",
              "Records of lost cache services' sequences that the leader has removed",
              stats.cleaned),
      Gauge("heavywater_sequence_copies", "Copies of sequences in the Redis",
            static_cast<double>(published.copies)),
      Gauge("heavywater_sequence_copy_bytes", "Bytes of these",
            static_cast<double>(published.copy_bytes)),
      Family(MetricType::Counter, "heavywater_sequence_copies_total",
             "Copies of sequences to the Redis, by result", "result",
             {{"done", static_cast<double>(published.copied)},
              {"failed", static_cast<double>(published.copies_failed)}}),
  };
}

}  // namespace heavywater
