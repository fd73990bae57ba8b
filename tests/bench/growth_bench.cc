// `growth`: what a token costs at a fixed budget when few and when many tokens have been
// seen. Recall is off; K and V are random and go through the append path, host pages
// included.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/local_host_tier.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/options.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_engine.h"

namespace heavywater {
namespace {

constexpr SequenceId kSequence = 1;
constexpr int64_t kHostBytes = int64_t{1} << 30;
constexpr int64_t kBudget = 1024;  // half of it recent
constexpr int64_t kSeen[] = {2048, 8192, 65536};
constexpr int64_t kQuickSeen[] = {1280, 2048};
constexpr int64_t kTokensAtOnce = 256;  // of appends that are not timed
constexpr int kTimedTokens = 255;       // one a step, up to the number seen; the median counts

std::vector<float> RandomRows(int num_heads) {
  std::mt19937 rng(1);
  return RandomFloats(rng, kTokensAtOnce * num_heads * BenchShape().head_dim);
}

// One sequence of one layer on one rank, as an engine drives it.
class GrowingSequence {
 public:
  static absl::StatusOr<std::unique_ptr<GrowingSequence>> Create(Backend& backend, Policy policy) {
    std::unique_ptr<GrowingSequence> sequence(new GrowingSequence);
    RankCacheOptions options;
    options.shape = BenchShape();
    options.max_step_tokens = kTokensAtOnce;
    HW_ASSIGN_OR_RETURN(sequence->cache_, RankCache::Create(options, backend, &sequence->tier_));
    sequence->engine_ =
        std::make_unique<AttentionEngine>(*sequence->cache_, *sequence->communicators_[0]);
    SequenceOptions opened;
    opened.policy.policy = policy;
    opened.policy.heavy_tokens = opened.policy.recent_tokens = kBudget / 2;
    opened.prompt_tokens = kTokensAtOnce;
    opened.max_tokens = *std::ranges::max_element(kSeen) + 1;
    HW_RETURN_IF_ERROR(sequence->engine_->Open(kSequence, opened));
    HW_RETURN_IF_ERROR(sequence->Append(kTokensAtOnce));
    return sequence;
  }

  // In steps of as many tokens as fit.
  absl::Status GrowTo(int64_t seen) {
    while (seen_ < seen) HW_RETURN_IF_ERROR(Append(std::min(seen - seen_, kTokensAtOnce)));
    return absl::OkStatus();
  }

  // Of steps of one token each, the plan included.
  absl::StatusOr<double> MedianSecondsPerToken() {
    std::vector<double> seconds;
    for (int i = 0; i < kTimedTokens; ++i) {
      const double start = CpuSeconds();
      HW_RETURN_IF_ERROR(Append(1));
      seconds.push_back(CpuSeconds() - start);
    }
    const auto middle = seconds.begin() + kTimedTokens / 2;
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
  }

  // INTERNAL unless the budget holds and all that was evicted can be read.
  absl::Status Check() const {
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_->Stats(kSequence));
    if (stats.tokens_seen == seen_ && stats.tokens_resident == kBudget &&
        stats.tokens_demoted == seen_ - kBudget) {
      return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat(
        "of ", seen_, " tokens ", stats.tokens_seen, " were seen, ", stats.tokens_resident,
        " are resident and ", stats.tokens_demoted, " demoted, want ", kBudget, " resident"));
  }

 private:
  absl::Status Append(int64_t count) {
    const KvShape shape = BenchShape();
    const EngineItem item{.sequence = kSequence,
                          .phase = seen_ == 0 ? EnginePhase::kPromptLast : EnginePhase::kDecode,
                          .first_position = static_cast<Position>(seen_),
                          .num_tokens = count};
    HW_RETURN_IF_ERROR(engine_->Begin({&item, 1}));
    const size_t queries = count * shape.num_query_heads * shape.head_dim;
    const size_t keys = count * shape.num_kv_heads * shape.head_dim;
    HW_RETURN_IF_ERROR(engine_->AttendHost(0, {.queries = std::span(queries_).first(queries),
                                               .keys = std::span(keys_).first(keys),
                                               .values = std::span(values_).first(keys),
                                               .out = std::span(out_).first(queries)}));
    HW_RETURN_IF_ERROR(engine_->End());
    HW_RETURN_IF_ERROR(engine_->item_status()[0]);
    seen_ += count;
    return absl::OkStatus();
  }

  LocalHostTier tier_{kHostBytes};
  std::vector<std::unique_ptr<Communicator>> communicators_ =
      CreateLocalGroup(1, absl::Seconds(20));
  std::unique_ptr<RankCache> cache_;
  std::unique_ptr<AttentionEngine> engine_;
  const std::vector<float> queries_ = RandomRows(BenchShape().num_query_heads);
  const std::vector<float> keys_ = RandomRows(BenchShape().num_kv_heads);
  const std::vector<float> values_ = RandomRows(BenchShape().num_kv_heads);
  std::vector<float> out_ = std::vector<float>(queries_.size());
  int64_t seen_ = 0;
};

}  // namespace

absl::StatusOr<BenchJson> RunGrowthBench(const BenchOptions& options) {
  const std::unique_ptr<Backend> backend = BenchBackend("best");
  if (backend == nullptr) return absl::FailedPreconditionError("no kernels for this machine");
  std::span<const int64_t> all_seen = kSeen;
  if (options.quick) all_seen = kQuickSeen;
  BenchJson rows = BenchJson::array();
  for (const Policy policy : {Policy::kH2o, Policy::kSnapKvH2o}) {
    HW_ASSIGN_OR_RETURN(const std::unique_ptr<GrowingSequence> sequence,
                        GrowingSequence::Create(*backend, policy));
    double first = 0;
    for (const int64_t seen : all_seen) {
      HW_RETURN_IF_ERROR(sequence->GrowTo(seen - kTimedTokens));
      HW_ASSIGN_OR_RETURN(const double seconds, sequence->MedianSecondsPerToken());
      HW_RETURN_IF_ERROR(sequence->Check());
      if (first == 0) first = seconds;
      rows.push_back({{"policy", PolicyName(policy)},
                      {"budget", kBudget},
                      {"seen", seen},
                      {"us_per_token", seconds * 1e6},
                      {"vs_first", seconds / first}});
    }
  }
  return BenchJson{{"rows", std::move(rows)}};
}

}  // namespace heavywater
