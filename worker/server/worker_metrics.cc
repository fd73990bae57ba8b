#include "worker/server/worker_metrics.h"

#include <utility>

#include "absl/time/clock.h"

namespace heavywater {
namespace {

constexpr absl::Duration kUpdateInterval = absl::Milliseconds(250);

prometheus::Family<prometheus::Gauge>& Gauges(prometheus::Registry& registry, const char* name,
                                              const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

prometheus::Gauge& Gauge(prometheus::Registry& registry, const char* name, const char* help) {
  return Gauges(registry, name, help).Add({});
}

prometheus::Counter& Counter(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

const prometheus::Histogram::BucketBoundaries& StepBuckets() {
  static const auto* const buckets = new prometheus::Histogram::BucketBoundaries{
      0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5};
  return *buckets;
}

prometheus::Histogram& AgeHistogram(prometheus::Registry& registry) {
  prometheus::Histogram::BucketBoundaries boundaries;
  for (int bucket = 0; bucket + 1 < EvictionAges::kBuckets; ++bucket) {
    boundaries.push_back(static_cast<double>(int64_t{1} << bucket));
  }
  return prometheus::BuildHistogram()
      .Name("heavywater_eviction_age_tokens")
      .Help("Tokens seen since a position when it lost its slot, by layer and set")
      .Register(registry)
      .Add({}, boundaries);
}

std::array<prometheus::Counter*, kNumStepPhases> PhaseCounters(prometheus::Registry& registry) {
  auto& family = prometheus::BuildCounter()
                     .Name("heavywater_step_phase_seconds_total")
                     .Help("Where this rank's steps and prompt chunks spend their time")
                     .Register(registry);
  std::array<prometheus::Counter*, kNumStepPhases> counters = {};
  for (int i = 0; i < kNumStepPhases; ++i) {
    const auto phase = static_cast<StepPhase>(i);
    if (phase == StepPhase::kOutside) continue;
    counters[static_cast<size_t>(i)] = &family.Add({{"phase", std::string(StepPhaseName(phase))}});
  }
  return counters;
}

}  // namespace

WorkerMetrics::WorkerMetrics(std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)),
      tokens_(Counter(*registry_, "heavywater_tokens_generated_total", "New tokens given out")),
      prompt_tokens_(Counter(*registry_, "heavywater_prompt_tokens_total",
                             "Tokens of finished prompts and of what was appended")),
      prefix_tokens_(Counter(*registry_, "heavywater_prefix_tokens_reused_total",
                             "Of prompt tokens: taken from stored pages, not computed")),
      step_seconds_(prometheus::BuildHistogram()
                        .Name("heavywater_step_seconds")
                        .Help("Time of one prompt chunk or one decode step of the group")
                        .Register(*registry_)),
      phases_(PhaseCounters(*registry_)),
      sequences_(Gauges(*registry_, "heavywater_sequences", "Sequences, by state")),
      positions_(
          Gauges(*registry_, "heavywater_positions", "Positions of running sequences, by state")),
      device_bytes_(
          Gauges(*registry_, "heavywater_device_bytes", "Device memory of this rank, by kind")),
      device_limit_(Gauge(*registry_, "heavywater_device_limit_bytes",
                          "device_memory_bytes of this rank, 0 = none")),
      host_bytes_(Gauge(*registry_, "heavywater_host_bytes",
                        "Host pages of running sequences of this rank")),
      plans_(Counter(*registry_, "heavywater_plans_total", "Plans in decode")),
      evictions_(Counter(*registry_, "heavywater_evicted_positions_total",
                         "Positions that lost their slot, less those that came back")),
      eviction_ages_(AgeHistogram(*registry_)),
      recall_reads_(Counter(*registry_, "heavywater_recall_reads_total",
                            "Demoted positions that queries read in place, by KV head and layer")),
      promoted_(Counter(*registry_, "heavywater_promoted_total",
                        "Demoted positions that came back into slots, by layer and set")),
      resting_pages_(Gauge(*registry_, "heavywater_resting_pages",
                           "Host pages of running sequences of this rank that rest, by layer and "
                           "KV head: they are not read before they have been asked for")),
      pages_rested_(Counter(*registry_, "heavywater_pages_rested_total",
                            "Host pages that came to rest since host memory was short")),
      pages_asked_(Counter(*registry_, "heavywater_pages_asked_total",
                           "Resting pages that were asked for, since queries missed them")),
      pages_returned_(
          Counter(*registry_, "heavywater_pages_returned_total", "Resting pages that came back")),
      pages_lost_(Counter(*registry_, "heavywater_pages_lost_total",
                          "Resting pages that were asked for and are lost")),
      missed_picks_(Counter(*registry_, "heavywater_recall_missed_total",
                            "Demoted positions that queries picked while their page rested, and "
                            "did not read; beside heavywater_recall_reads_total")),
      waits_given_up_(Counter(*registry_, "heavywater_recall_waits_given_up_total",
                              "Waits of recall_wait that ended before the pages were there")),
      mass_missing_(Gauge(*registry_, "heavywater_attention_mass_missing_ratio",
                          "Estimated share of attention that demoted positions would have had "
                          "which were not picked; mean over running sequences with recall")),
      group_failures_(Counter(*registry_, "heavywater_group_failures_total",
                              "Formations of the group that lost a rank")),
      restored_(Counter(*registry_, "heavywater_sequences_restored_total",
                        "Sequences that went on from their committed state")),
      recomputed_(Counter(*registry_, "heavywater_sequences_recomputed_total",
                          "Sequences that went on after their tokens were computed again, since "
                          "no committed state or not all of its pages were there")),
      reports_queued_(Gauge(*registry_, "heavywater_reports_queued",
                            "Reports that wait for the cache service")),
      reports_dropped_(Gauge(*registry_, "heavywater_reports_dropped",
                             "Reports that were merged away or refused since the start")),
      link_up_(
          Gauge(*registry_, "heavywater_cache_service_up", "1 when the cache service answers")) {}

void WorkerMetrics::ObserveStep(const std::string& phase, absl::Duration took) {
  step_seconds_.Add({{"phase", phase}}, StepBuckets()).Observe(absl::ToDoubleSeconds(took));
}

void WorkerMetrics::SetSequences(int64_t queued, int64_t running) {
  sequences_.Add({{"state", "queued"}}).Set(static_cast<double>(queued));
  sequences_.Add({{"state", "running"}}).Set(static_cast<double>(running));
}

void WorkerMetrics::Update(const RankCache& cache, bool now) {
  const absl::Time time = absl::Now();
  if (!now && time < next_update_) return;
  next_update_ = time + kUpdateInterval;
  UpdatePhases();
  for (int kind = 0; kind < kNumMemoryKinds; ++kind) {
    const auto memory_kind = static_cast<MemoryKind>(kind);
    device_bytes_.Add({{"kind", std::string(MemoryKindName(memory_kind))}})
        .Set(static_cast<double>(cache.memory().gauge(memory_kind).current_bytes));
  }
  device_limit_.Set(static_cast<double>(cache.memory().limit_bytes()));
  UpdateTokens(cache);
  UpdateAges(cache.eviction_ages());
}

void WorkerMetrics::UpdateAges(const EvictionAges& ages) {
  std::vector<double> more(EvictionAges::kBuckets);
  for (int bucket = 0; bucket < EvictionAges::kBuckets; ++bucket) {
    more[bucket] = static_cast<double>(ages.counts()[bucket] - counted_ages_.counts()[bucket]);
  }
  eviction_ages_.ObserveMultiple(more, static_cast<double>(ages.sum() - counted_ages_.sum()));
  counted_ages_ = ages;
}

void WorkerMetrics::UpdatePhases() {
  const StepPhaseTimes times = TakeStepPhaseTimes();
  for (size_t i = 0; i < times.size(); ++i) {
    if (phases_[i] != nullptr) phases_[i]->Increment(1e-9 * static_cast<double>(times[i]));
  }
}

void WorkerMetrics::UpdateTokens(const RankCache& cache) {
  SequenceStats sum;
  int64_t recalling = 0;
  std::map<SequenceId, Progress> progress;
  for (SequenceId sequence : cache.sequence_ids()) {
    const auto stats = cache.Stats(sequence);
    if (!stats.ok()) continue;
    sum.tokens_seen += stats->tokens_seen;
    sum.tokens_resident += stats->tokens_resident;
    sum.tokens_demoted += stats->tokens_demoted;
    sum.tokens_dropped += stats->tokens_dropped;
    sum.host_bytes += stats->host_bytes;
    const Progress last = progress_[sequence];
    Progress& next = progress[sequence];
    next = {stats->plans,          stats->tokens_demoted + stats->tokens_dropped,
            stats->recall_reads,   stats->promoted,
            stats->pages_rested,   stats->pages_asked,
            stats->pages_returned, stats->pages_lost,
            stats->missed_picks,   stats->waits_given_up};
    plans_.Increment(static_cast<double>(next.plans - last.plans));
    evictions_.Increment(static_cast<double>(next.evicted - last.evicted));
    recall_reads_.Increment(static_cast<double>(next.recall_reads - last.recall_reads));
    promoted_.Increment(static_cast<double>(next.promoted - last.promoted));
    pages_rested_.Increment(static_cast<double>(next.pages_rested - last.pages_rested));
    pages_asked_.Increment(static_cast<double>(next.pages_asked - last.pages_asked));
    pages_returned_.Increment(static_cast<double>(next.pages_returned - last.pages_returned));
    pages_lost_.Increment(static_cast<double>(next.pages_lost - last.pages_lost));
    missed_picks_.Increment(static_cast<double>(next.missed_picks - last.missed_picks));
    waits_given_up_.Increment(static_cast<double>(next.waits_given_up - last.waits_given_up));
    sum.pages_resting += stats->pages_resting;
    if (stats->recall_queries == 0) continue;
    ++recalling;
    sum.mass_missing += stats->mass_missing;
  }
  // The last value stays while nothing runs: there is nothing newer to say.
  if (recalling > 0) mass_missing_.Set(sum.mass_missing / static_cast<double>(recalling));
  progress_ = std::move(progress);
  resting_pages_.Set(static_cast<double>(sum.pages_resting));
  positions_.Add({{"state", "seen"}}).Set(static_cast<double>(sum.tokens_seen));
  positions_.Add({{"state", "resident"}}).Set(static_cast<double>(sum.tokens_resident));
  positions_.Add({{"state", "demoted"}}).Set(static_cast<double>(sum.tokens_demoted));
  positions_.Add({{"state", "dropped"}}).Set(static_cast<double>(sum.tokens_dropped));
  host_bytes_.Set(static_cast<double>(sum.host_bytes));
}

void WorkerMetrics::SetLink(bool up, int64_t reports_queued, int64_t reports_dropped) {
  link_up_.Set(up ? 1 : 0);
  reports_queued_.Set(static_cast<double>(reports_queued));
  reports_dropped_.Set(static_cast<double>(reports_dropped));
}

}  // namespace heavywater
