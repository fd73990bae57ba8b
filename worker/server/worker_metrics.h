// What Prometheus sees of a worker.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/step_phases.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// Used by the thread of the step, except SetLink()
// and CountFailedFormation(); the registry is thread safe.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(std::shared_ptr<prometheus::Registry> registry);

  void ObserveStep(const std::string& phase, absl::Duration took);  // "prompt", "decode"
  void AddTokens(int64_t count) { tokens_.Increment(static_cast<double>(count)); }
  void AddPromptTokens(int64_t count) { prompt_tokens_.Increment(static_cast<double>(count)); }
  void AddPrefixTokens(int64_t count) { prefix_tokens_.Increment(static_cast<double>(count)); }
  void SetSequences(int64_t queued, int64_t running);
  // Where the calling thread's steps spend their time, and
  // gauges of this rank's cache, a few times a second at most, or `now`: before
  // a sequence goes, so that all its plans and evictions are counted.
  void Update(const RankCache& cache, bool now = false);
  void CountFailedFormation() { group_failures_.Increment(); }
  // A sequence that goes on after a break: from its pages, or computed again.
  void CountRestored(bool from_pages) { (from_pages ? restored_ : recomputed_).Increment(); }
  void SetLink(bool up, int64_t reports_queued, int64_t reports_dropped);

 private:
  struct Progress {
    int64_t plans = 0;
    int64_t evicted = 0;
    int64_t recall_reads = 0;
    int64_t promoted = 0;
    int64_t pages_rested = 0;
    int64_t pages_asked = 0;
    int64_t pages_returned = 0;
    int64_t pages_lost = 0;
    int64_t missed_picks = 0;
    int64_t waits_given_up = 0;
  };
  void UpdateTokens(const RankCache& cache);
  void UpdatePhases();
  void UpdateAges(const EvictionAges& ages);

  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Counter& tokens_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& prefix_tokens_;
  prometheus::Family<prometheus::Histogram>& step_seconds_;
  std::array<prometheus::Counter*, kNumStepPhases> phases_;  // null: not accounted for
  prometheus::Family<prometheus::Gauge>& sequences_;
  prometheus::Family<prometheus::Gauge>& positions_;
  prometheus::Family<prometheus::Gauge>& device_bytes_;
  prometheus::Gauge& device_limit_;
  prometheus::Gauge& host_bytes_;
  prometheus::Counter& plans_;
  prometheus::Counter& evictions_;
  prometheus::Histogram& eviction_ages_;
  EvictionAges counted_ages_;  // that it has
  prometheus::Counter& recall_reads_;
  prometheus::Counter& promoted_;
  prometheus::Gauge& resting_pages_;
  prometheus::Counter& pages_rested_;
  prometheus::Counter& pages_asked_;
  prometheus::Counter& pages_returned_;
  prometheus::Counter& pages_lost_;
  prometheus::Counter& missed_picks_;
  prometheus::Counter& waits_given_up_;
  prometheus::Gauge& mass_missing_;
  prometheus::Counter& group_failures_;
  prometheus::Counter& restored_;
  prometheus::Counter& recomputed_;
  prometheus::Gauge& reports_queued_;
  prometheus::Gauge& reports_dropped_;
  prometheus::Gauge& link_up_;
  absl::Time next_update_ = absl::InfinitePast();
  std::map<SequenceId, Progress> progress_;
};

}  // namespace heavywater
