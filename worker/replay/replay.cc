#include "worker/replay/replay.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/local_host_tier.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/policy/selection.h"
#include "worker/rank/attention_engine.h"

namespace heavywater {
namespace {

constexpr SequenceId kSequence = 1;
constexpr int64_t kHostBytes = int64_t{64} << 30;  // a bound, not taken
constexpr int kMaxStepTokens = 512;

KvShape ShapeOf(const TraceShape& trace, const ReplayOptions& options) {
  KvShape shape;
  shape.num_layers = trace.num_layers;
  shape.num_query_heads = shape.total_query_heads = trace.num_query_heads;
  shape.num_kv_heads = shape.total_kv_heads = trace.num_kv_heads;
  shape.head_dim = trace.head_dim;
  shape.dtype = trace.dtype;
  shape.page_tokens = options.page_tokens;
  return shape;
}

class Player {
 public:
  Player(const Trace& trace, const PolicyOptions& policy, const ReplayOptions& options)
      : trace_(trace), policy_(policy), options_(options), host_(kHostBytes) {}

  absl::StatusOr<ReplayFigures> Run(const std::function<void()>& on_token) {
    HW_RETURN_IF_ERROR(Start());
    HW_RETURN_IF_ERROR(Step(0, shape().prompt_tokens));
    for (int64_t token = shape().prompt_tokens; token < shape().num_tokens; ++token) {
      HW_ASSIGN_OR_RETURN(const KeptSequence before, engine_->Kept(kSequence));
      HW_RETURN_IF_ERROR(Step(token, 1));
      HW_ASSIGN_OR_RETURN(const KeptSequence after, engine_->Kept(kSequence));
      Measure(token, before.report, after.picks);
      on_token();
    }
    return Figures();
  }

 private:
  const TraceShape& shape() const { return trace_.shape; }

  absl::Status Start() {
    if (shape().prompt_tokens == shape().num_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("prompt_tokens is ", shape().prompt_tokens,
                                                     ", as many as the trace has: nothing comes "
                                                     "after the prompt"));
    }
    HW_ASSIGN_OR_RETURN(backend_, CreateCpuBackend({.num_threads = options_.num_threads}));
    ranks_ = CreateLocalGroup(1, absl::Minutes(10));
    HW_ASSIGN_OR_RETURN(
        cache_, RankCache::Create({.shape = ShapeOf(shape(), options_),
                                   .max_step_tokens = kMaxStepTokens,
                                   .attention_scale = static_cast<float>(shape().attention_scale)},
                                  *backend_, &host_));
    engine_ = std::make_unique<AttentionEngine>(*cache_, *ranks_[0]);
    HW_ASSIGN_OR_RETURN(budget_, ResolveBudget(policy_, shape().prompt_tokens, shape().num_layers));
    return engine_->Open(kSequence, {.policy = policy_,
                                     .prompt_tokens = shape().prompt_tokens,
                                     .max_tokens = shape().num_tokens});
  }

  // Tokens through all layers. A prompt's come in parts of kMaxStepTokens.
  absl::Status Step(int64_t first, int64_t count) {
    const EngineItem item = {.sequence = kSequence,
                             .phase = first == 0 ? EnginePhase::kPromptLast : EnginePhase::kDecode,
                             .first_position = static_cast<Position>(first),
                             .num_tokens = count,
                             .note_picks = first > 0};
    HW_RETURN_IF_ERROR(engine_->Begin({&item, 1}));
    out_.assign(shape().num_layers, {});
    for (int layer = 0; layer < shape().num_layers; ++layer) {
      for (int64_t done = 0; done < count; done += kMaxStepTokens) {
        HW_RETURN_IF_ERROR(
            Attend(layer, first + done, std::min<int64_t>(kMaxStepTokens, count - done)));
      }
    }
    HW_RETURN_IF_ERROR(engine_->End());
    return engine_->item_status()[0];
  }

  absl::Status Attend(int layer, int64_t first, int64_t count) {
    const TraceLayer& rows = trace_.layers[layer];
    const auto part = [&](const std::vector<float>& all, int64_t width) {
      return std::span(all).subspan(first * width, count * width);
    };
    out_[layer].resize(count * shape().query_width());
    return engine_->AttendHost(layer, {.queries = part(rows.q, shape().query_width()),
                                       .keys = part(rows.k, shape().kv_width()),
                                       .values = part(rows.v, shape().kv_width()),
                                       .out = out_[layer]});
  }

  // What the heads of a KV head attended to in a layer: residents and picks. Ascending,
  // but for the token itself.
  void Measure(int64_t token, const PlanReport& report, const std::vector<QueryPicks>& picks) {
    std::map<std::pair<int, int>, std::vector<Position>> attended;
    for (const ResidentSet& set : report.sets) {
      for (int head = 0; head < shape().num_kv_heads; ++head) {
        if (set.kv_head != -1 && set.kv_head != head) continue;
        attended[{set.layer, head}] = set.positions;
      }
    }
    for (const QueryPicks& pick : picks) {
      std::vector<Position>& positions = attended[{pick.layer, pick.kv_head}];
      positions.insert(positions.end(), pick.positions.begin(), pick.positions.end());
    }
    const int group = shape().num_query_heads / shape().num_kv_heads;
    for (int layer = 0; layer < shape().num_layers; ++layer) {
      for (int head = 0; head < shape().num_query_heads; ++head) {
        std::vector<Position>& positions = attended[{layer, head / group}];
        if (policy_.policy == Policy::kOracle && head % group == 0) {
          positions = TopOf(layer, token, head / group);
        }
        MeasureQuery(layer, token, head, positions);
      }
    }
  }

  // What the oracle's KV head chooses of everything: by the full attention of its group.
  std::vector<Position> TopOf(int layer, int64_t token, int kv_head) const {
    const int group = shape().num_query_heads / shape().num_kv_heads;
    std::vector<int64_t> paid(token + 1);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const std::vector<double> p = full_.Probabilities(layer, token, head);
      for (size_t i = 0; i < p.size(); ++i) paid[i] += std::llrint(p[i] * 4294967296.0);
    }
    std::vector<Position> positions(paid.size());
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<Position> top;
    for (const int32_t index : SelectKept({.positions = positions, .scores = paid},
                                          {.budget_tokens = budget_.attended_tokens,
                                          .sink_tokens = budget_.sink_tokens,
                                          .recent_tokens = budget_.recent_tokens,
                                          .tokens_seen = token + 1})) {
      if (index != token) top.push_back(positions[index]);
    }
    return top;
  }

  void MeasureQuery(int layer, int64_t token, int head, const std::vector<Position>& attended) {
    const std::vector<double> p = full_.Probabilities(layer, token, head);
    double mass = p[token];
    for (const Position position : attended) mass += p[position];
    const auto most = std::max_element(p.begin(), p.end()) - p.begin();
    const bool agrees = most == token || std::find(attended.begin(), attended.end(),
                                                   static_cast<Position>(most)) != attended.end();
    const std::vector<double> want = full_.Output(layer, head, p);
    for (int i = 0; i < shape().head_dim; ++i) {
      const double got = out_[layer][head * shape().head_dim + i];
      squared_error_ += (got - want[i]) * (got - want[i]);
      squared_full_ += want[i] * want[i];
    }
    mass_ += std::min(mass, 1.0);
    agreed_ += agrees ? 1 : 0;
    ++queries_;
  }

  absl::StatusOr<ReplayFigures> Figures() const {
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_->Stats(kSequence));
    const auto queries = static_cast<double>(queries_);
    const KvShape& kv = cache_->options().shape;
    const int64_t pages = (shape().num_tokens + kv.page_tokens - 1) / kv.page_tokens;
    return ReplayFigures{.queries = queries_,
                         .mass_kept = mass_ / queries,
                         .error = squared_full_ > 0 ? std::sqrt(squared_error_ / squared_full_) : 0,
                         .agreement = static_cast<double>(agreed_) / queries,
                         .tokens_resident = static_cast<double>(stats.tokens_resident),
                         .device_bytes = stats.peak_device_bytes_after_prompt,
                         .full_cache_bytes = pages * kv.page_tokens * kv.row_bytes() *
                                             kv.num_kv_heads * kv.num_layers};
  }

  const Trace& trace_;
  const PolicyOptions policy_;
  const ReplayOptions options_;
  const FullAttention full_{trace_};
  Budget budget_;
  LocalHostTier host_;
  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
  std::unique_ptr<RankCache> cache_;
  std::unique_ptr<AttentionEngine> engine_;
  std::vector<std::vector<float>> out_;  // [layer], of the last part
  int64_t queries_ = 0;
  int64_t agreed_ = 0;
  double mass_ = 0;
  double squared_error_ = 0;
  double squared_full_ = 0;
};

}  // namespace

FullAttention::FullAttention(const Trace& trace)
    : trace_(trace),
      scale_(trace.shape.attention_scale > 0
                 ? trace.shape.attention_scale
                 : 1 / std::sqrt(static_cast<double>(trace.shape.head_dim))) {}

std::vector<double> FullAttention::Probabilities(int layer, int64_t token, int query_head) const {
  const TraceShape& shape = trace_.shape;
  const TraceLayer& rows = trace_.layers[layer];
  const int kv_head = query_head / (shape.num_query_heads / shape.num_kv_heads);
  const float* query = rows.q.data() + token * shape.query_width() + query_head * shape.head_dim;
  std::vector<double> p(token + 1);
  for (int64_t position = 0; position <= token; ++position) {
    const float* key = rows.k.data() + position * shape.kv_width() + kv_head * shape.head_dim;
    double dot = 0;
    for (int i = 0; i < shape.head_dim; ++i) dot += double{query[i]} * key[i];
    p[position] = dot * scale_;
  }
  const double largest = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& value : p) sum += value = std::exp(value - largest);
  for (double& value : p) value /= sum;
  return p;
}

std::vector<double> FullAttention::Output(int layer, int query_head,
                                          const std::vector<double>& probabilities) const {
  const TraceShape& shape = trace_.shape;
  const int kv_head = query_head / (shape.num_query_heads / shape.num_kv_heads);
  std::vector<double> out(shape.head_dim);
  for (size_t position = 0; position < probabilities.size(); ++position) {
    const float* value = trace_.layers[layer].v.data() +
                         static_cast<int64_t>(position) * shape.kv_width() +
                         kv_head * shape.head_dim;
    for (int i = 0; i < shape.head_dim; ++i) out[i] += probabilities[position] * value[i];
  }
  return out;
}

absl::StatusOr<ReplayFigures> Replay(const Trace& trace, const PolicyOptions& policy,
                                     const ReplayOptions& options,
                                     const std::function<void()>& on_token) {
  return Player(trace, policy, options).Run(on_token);
}

}  // namespace heavywater
