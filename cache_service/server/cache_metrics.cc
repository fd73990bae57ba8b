#include "cache_service/server/cache_metrics.h"

#include <prometheus/metric_family.h>

#include <string>
#include <utility>

namespace heavywater {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily Family(MetricType type, const char* name, const char* help) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}

void Add(MetricFamily& family, double value,
         std::vector<prometheus::ClientMetric::Label> labels = {}) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  if (family.type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
}

MetricFamily Gauge(const char* name, const char* help, int64_t value) {
  MetricFamily family = Family(MetricType::Gauge, name, help);
  Add(family, static_cast<double>(value));
  return family;
}

MetricFamily Counter(const char* name, const char* help, int64_t value) {
  MetricFamily family = Family(MetricType::Counter, name, help);
  Add(family, static_cast<double>(value));
  return family;
}

MetricFamily TierBytes(const PageStoreStats& stats) {
  MetricFamily family = Family(MetricType::Gauge, "heavywater_tier_bytes",
                               "Bytes of a tier: free + used = total; promised is part of free, "
                               "retiring part of used");
  const std::pair<const char*, int64_t> states[] = {{"total", stats.total_bytes},
                                                    {"used", stats.used_bytes},
                                                    {"free", stats.free_bytes},
                                                    {"promised", stats.promised_bytes},
                                                    {"retiring", stats.retiring_bytes}};
  for (const auto& [state, bytes] : states) {
    Add(family, static_cast<double>(bytes), {{"tier", "host"}, {"state", state}});
  }
  return family;
}

}  // namespace

std::vector<MetricFamily> CacheMetrics::Collect() const {
  const PageStoreStats stats = store_.Stats();
  SequenceRegistry& sequences = registry_.sequences();
  GroupRegistry& groups = registry_.groups();
  return {
      Gauge("heavywater_sequences", "Open sequences", sequences.num_sequences()),
      Gauge("heavywater_groups", "Worker groups", groups.num_groups()),
      Gauge("heavywater_ranks", "Ranks that are members of a group", groups.num_ranks()),
      TierBytes(stats),
      Gauge("heavywater_tier_pages", "Pages reserved in the host tier", stats.pages),
      Counter("heavywater_reservations_refused_total",
              "Reservations and admissions that found no room, also where ending finished "
              "sequences then made some",
              stats.reservations_refused),
      Counter("heavywater_sequences_reclaimed_total",
              "Finished sequences ended before their lease to make room",
              sequences.num_reclaimed()),
      Counter("heavywater_pages_written_total", "Writes of rows through gRPC", stats.writes),
      Counter("heavywater_pages_read_total", "Reads of rows from pages", stats.reads),
      Counter("heavywater_bytes_written_total", "Bytes written through gRPC", stats.bytes_written),
      Counter("heavywater_bytes_read_total", "Bytes read from pages", stats.bytes_read),
      Counter("heavywater_checksum_failures_total", "Sealed pages found changed",
              stats.checksum_failures),
      Counter("heavywater_plan_reports_total", "Plan reports taken", sequences.num_reports()),
      Counter("heavywater_plan_disagreements_total", "Sequences whose ranks disagreed on a plan",
              sequences.num_disagreements()),
  };
}

}  // namespace heavywater
