#include "cache_service/server/cache_metrics.h"

#include <prometheus/metric_family.h>

#include <limits>
#include <string>
#include <utility>

#include "cache_service/registry/tenant_quotas.h"

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

using Labels = std::vector<prometheus::ClientMetric::Label>;

MetricFamily TierBytes(const PageStoreStats& stats) {
  MetricFamily family = Family(MetricType::Gauge, "heavywater_tier_bytes",
                               "Bytes of a tier: free + used = total; promised is part of free, "
                               "retiring part of used");
  const auto add = [&family](const std::string& tier, const char* state, int64_t bytes) {
    Add(family, static_cast<double>(bytes), {{"tier", tier}, {"state", state}});
  };
  add("host", "total", stats.total_bytes);
  add("host", "used", stats.used_bytes);
  add("host", "free", stats.free_bytes);
  add("host", "promised", stats.promised_bytes);
  add("host", "retiring", stats.retiring_bytes);
  for (const TierStats& tier : stats.below) {
    add(tier.tier, "total", tier.total_bytes);
    add(tier.tier, "used", tier.used_bytes);
    add(tier.tier, "free", tier.free_bytes);
  }
  return family;
}

// One figure of each tier; `host` first.
MetricFamily PerTier(MetricType type, const char* name, const char* help,
                     const PageStoreStats& stats, int64_t host, int64_t TierStats::*figure) {
  MetricFamily family = Family(type, name, help);
  Add(family, static_cast<double>(host), {{"tier", "host"}});
  for (const TierStats& tier : stats.below) {
    Add(family, static_cast<double>(tier.*figure), {{"tier", tier.tier}});
  }
  return family;
}

MetricFamily TierMoves(const PageStoreStats& stats) {
  MetricFamily family = Family(MetricType::Counter, "heavywater_tier_moves_total",
                               "Pages that left a tier: down to the next, or up to the host");
  Add(family, static_cast<double>(stats.moved_down), {{"tier", "host"}, {"direction", "down"}});
  for (const TierStats& tier : stats.below) {
    Add(family, static_cast<double>(tier.moved_down), {{"tier", tier.tier}, {"direction", "down"}});
    Add(family, static_cast<double>(tier.moved_up), {{"tier", tier.tier}, {"direction", "up"}});
  }
  return family;
}

void AddResidence(MetricFamily& family, const std::string& tier, const char* direction,
                  const Residence& residence) {
  prometheus::ClientMetric metric;
  metric.label = {{"tier", tier}, {"direction", direction}};
  prometheus::ClientMetric::Histogram& histogram = metric.histogram;
  for (size_t i = 0; i < residence.pages.size(); ++i) {
    histogram.sample_count += static_cast<uint64_t>(residence.pages[i]);
    const bool is_rest = i == kResidenceSeconds.size();
    histogram.bucket.push_back(
        {histogram.sample_count, is_rest ? std::numeric_limits<double>::infinity()
                                         : static_cast<double>(kResidenceSeconds[i])});
  }
  histogram.sample_sum = static_cast<double>(residence.seconds);
  family.metric.push_back(std::move(metric));
}

MetricFamily TierResidences(const PageStoreStats& stats) {
  MetricFamily family =
      Family(MetricType::Histogram, "heavywater_tier_residence_seconds",
             "How long pages that left a tier had been in it: down to the next, or up to the host");
  AddResidence(family, "host", "down", stats.residence[kHostTier].down);
  for (size_t i = 0; i < stats.below.size(); ++i) {
    AddResidence(family, stats.below[i].tier, "down", stats.residence[i + 1].down);
    AddResidence(family, stats.below[i].tier, "up", stats.residence[i + 1].up);
  }
  return family;
}

MetricFamily TierFailures(const PageStoreStats& stats) {
  MetricFamily family =
      Family(MetricType::Counter, "heavywater_tier_failures_total",
             "Pages that could not be stored, read or erased in a tier below the host's");
  for (const TierStats& tier : stats.below) {
    const TierStats::Failures& failures = tier.failures;
    const std::pair<const char*, int64_t> reasons[] = {{"full", failures.full},
                                                       {"unavailable", failures.unavailable},
                                                       {"corrupt", failures.corrupt},
                                                       {"missing", failures.missing},
                                                       {"other", failures.other}};
    for (const auto& [reason, count] : reasons) {
      Add(family, static_cast<double>(count), {{"tier", tier.tier}, {"reason", reason}});
    }
  }
  return family;
}

// A limit is there only where there is one.
void AddTenant(MetricFamily& family, const std::string& tenant, const char* tier, int64_t used,
               int64_t limit) {
  const auto add = [&](const char* state, int64_t value) {
    Labels labels = {{"tenant", tenant}, {"state", state}};
    if (tier != nullptr) labels.push_back({"tier", tier});
    Add(family, static_cast<double>(value), std::move(labels));
  };
  add("used", used);
  if (limit > 0) add("limit", limit);
}

void AddTenants(const TenantBook& book, std::vector<MetricFamily>* families) {
  MetricFamily bytes = Family(MetricType::Gauge, "heavywater_tenant_bytes",
                              "Bytes of pages of a tenant in host memory (room promised to prompts "
                              "included) and in the tiers below, and its quota");
  MetricFamily sequences = Family(MetricType::Gauge, "heavywater_tenant_sequences",
                                  "Sequences of a tenant, and its quota");
  int64_t left_out = 0;
  for (const TenantEntry& entry : ShownTenants(book, &left_out)) {
    AddTenant(bytes, entry.tenant, "host", entry.used.host_bytes, entry.limits.host_bytes);
    AddTenant(bytes, entry.tenant, "lower", entry.used.lower_bytes, entry.limits.lower_bytes);
    AddTenant(sequences, entry.tenant, nullptr, entry.used.sequences, entry.limits.sequences);
  }
  families->push_back(std::move(bytes));
  families->push_back(std::move(sequences));
  families->push_back(Counter("heavywater_quota_refused_total",
                              "What found no room in its tenant's quota, also where ending the "
                              "tenant's finished sequences then made some",
                              book.num_refused()));
}

}  // namespace

std::vector<MetricFamily> CacheMetrics::Collect() const {
  const PageStoreStats stats = store_.Stats();
  SequenceRegistry& sequences = registry_.sequences();
  GroupRegistry& groups = registry_.groups();
  const BlobStoreStats blobs = blobs_.Stats();
  const SequenceRegistry::PrefixStats prefixes = sequences.prefix_stats();
  std::vector<MetricFamily> families = {
      Gauge("heavywater_sequences", "Open sequences", sequences.num_sequences()),
      Gauge("heavywater_groups", "Worker groups", groups.num_groups()),
      Gauge("heavywater_ranks", "Ranks that are members of a group", groups.num_ranks()),
      Gauge("heavywater_snapshot_bytes",
            "Committed states to go on from after a failure; bounded, the oldest are dropped",
            sequences.snapshot_bytes()),
      Gauge("heavywater_shared_pages",
            "Pages in host memory that more than one sequence holds; each counts once in the tier",
            stats.shared_pages),
      Gauge("heavywater_prefix_pages", "Whole pages of prompts that others may begin with",
            prefixes.indexed_pages),
      Counter("heavywater_prefix_lookups_total", "Prompts that asked for a stored prefix",
              prefixes.lookups),
      Counter("heavywater_prefix_hits_total", "Those that began with one", prefixes.hits),
      Counter("heavywater_prefix_tokens_total", "Tokens that they began with", prefixes.tokens),
      Gauge("heavywater_blobs", "Values that engines have stored by key", blobs.blobs),
      Gauge("heavywater_blob_bytes", "Bytes that they hold, part of those of the tiers",
            blobs.held_bytes),
      Counter("heavywater_blob_hits_total", "Values asked for that were there", blobs.hits),
      Counter("heavywater_blob_misses_total", "Values asked for that were not", blobs.misses),
      Counter("heavywater_blobs_dropped_total", "Values dropped to make room, or lost",
              blobs.dropped),
      Counter("heavywater_blobs_refused_total", "Values that found no room", blobs.refused),
      TierBytes(stats),
      PerTier(MetricType::Gauge, "heavywater_tier_pages",
              "Pages of a tier; of the host's: reserved", stats, stats.pages, &TierStats::pages),
      PerTier(MetricType::Counter, "heavywater_tier_hits_total", "Reads that a tier answered",
              stats, stats.host_hits(), &TierStats::hits),
      TierMoves(stats),
      TierResidences(stats),
      TierFailures(stats),
      Gauge("heavywater_tier_resting_pages",
            "Pages of sequences that are being decoded which their ranks do not read for now, in "
            "all tiers",
            stats.resting_pages),
      Counter("heavywater_tier_asked_pages_total", "Pages that ranks asked to read again",
              stats.pages_asked),
      Counter("heavywater_tier_lost_pages_total", "Of these: lost or damaged", stats.pages_lost),
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
  AddTenants(store_.tenants(), &families);
  const SequenceRegistry::Pinned pinned = sequences.CountPinned();
  families.push_back(Gauge("heavywater_pins", "Pins of sequences", pinned.pins));
  families.push_back(Gauge("heavywater_pinned_bytes",
                           "Host memory of pinned sequences, which makes no room for others",
                           pinned.host_bytes));
  families.push_back(Gauge("heavywater_draining", "1 while the service takes no new work",
                           gate_.CheckNew().ok() ? 0 : 1));
  if (state_ != nullptr) {
    families.push_back(Gauge("heavywater_state_kept",
                             "1 while a restart goes on with what is here; 0: keeping has failed",
                             state_->broken().ok() ? 1 : 0));
  }
  return families;
}

}  // namespace heavywater
