// An engine in one process: synthetic Q, K and V through a cache that keeps 24 of some
// 100 tokens on the device and recalls the rest from host memory. Checks that reading
// everything back equals plain attention to the whole text.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "cache_service/tier/local_host_tier.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_engine.h"

namespace {

using namespace heavywater;

constexpr int kLayers = 2;
constexpr int kQueryHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int64_t kPrompt = 96;
constexpr int64_t kTokens = 112;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// [kTokens][heads][kHeadDim]
std::vector<float> Rows(int heads, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kTokens * heads * kHeadDim);
  for (float& x : rows) x = normal(random);
  return rows;
}

// Attention of the query at `position`, one head, to all positions up to its own.
std::vector<double> Plain(const std::vector<float>& q, const std::vector<float>& k,
                          const std::vector<float>& v, int64_t position, int head) {
  const int kv_head = head / (kQueryHeads / kKvHeads);
  std::vector<double> out(kHeadDim);
  double sum = 0;
  for (int64_t p = 0; p <= position; ++p) {
    double logit = 0;
    for (int c = 0; c < kHeadDim; ++c) {
      logit += double{q[(position * kQueryHeads + head) * kHeadDim + c]} *
               k[(p * kKvHeads + kv_head) * kHeadDim + c];
    }
    const double weight = std::exp(logit / std::sqrt(kHeadDim));
    sum += weight;
    for (int c = 0; c < kHeadDim; ++c) {
      out[c] += weight * v[(p * kKvHeads + kv_head) * kHeadDim + c];
    }
  }
  for (double& x : out) x /= sum;
  return out;
}

}  // namespace

int main() {
  auto backend = CreateCpuBackend({});
  Check(backend.status());
  LocalHostTier host(int64_t{64} << 20);
  const auto ranks = CreateLocalGroup(1, absl::Seconds(30));
  const KvShape shape{.num_layers = kLayers,
                      .num_query_heads = kQueryHeads,
                      .num_kv_heads = kKvHeads,
                      .total_kv_heads = kKvHeads,
                      .total_query_heads = kQueryHeads,
                      .head_dim = kHeadDim,
                      .dtype = KvDtype::kFloat32,
                      .page_tokens = 32};
  auto cache = RankCache::Create({.shape = shape}, **backend, &host);
  Check(cache.status());
  AttentionEngine engine(**cache, *ranks[0]);

  SequenceOptions options{
      .policy = *Preset("recall"), .prompt_tokens = kPrompt, .max_tokens = kTokens};
  options.policy.device_ratio = 0;
  options.policy.heavy_tokens = 16;
  options.policy.recent_tokens = 8;
  options.policy.recall.all = true;  // recall_tokens: all
  Check(engine.Open(1, options));

  std::vector<std::vector<float>> q, k, v;
  for (int layer = 0; layer < kLayers; ++layer) {
    q.push_back(Rows(kQueryHeads, 10 + layer));
    k.push_back(Rows(kKvHeads, 20 + layer));
    v.push_back(Rows(kKvHeads, 30 + layer));
  }
  double largest = 0;
  for (int64_t first = 0; first < kTokens;) {
    const int64_t count = first == 0 ? kPrompt : 1;
    const EngineItem item{.sequence = 1,
                          .phase = first == 0 ? EnginePhase::kPromptLast : EnginePhase::kDecode,
                          .first_position = static_cast<Position>(first),
                          .num_tokens = count};
    Check(engine.Begin({&item, 1}));
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto rows = [&](const std::vector<float>& all, int heads) {
        return std::span(all).subspan(first * heads * kHeadDim, count * heads * kHeadDim);
      };
      std::vector<float> out(count * kQueryHeads * kHeadDim);
      Check(engine.AttendHost(layer, {.queries = rows(q[layer], kQueryHeads),
                                      .keys = rows(k[layer], kKvHeads),
                                      .values = rows(v[layer], kKvHeads),
                                      .out = out}));
      for (int head = 0; head < kQueryHeads; ++head) {
        const auto want = Plain(q[layer], k[layer], v[layer], first + count - 1, head);
        const float* got = &out[((count - 1) * kQueryHeads + head) * kHeadDim];
        for (int c = 0; c < kHeadDim; ++c) largest = std::max(largest, std::abs(got[c] - want[c]));
      }
    }
    Check(engine.End());
    Check(engine.item_status()[0]);
    first += count;
  }
  const auto kept = engine.Kept(1);
  Check(kept.status());
  std::printf("%lld of %lld tokens resident, largest difference %g\n",
              static_cast<long long>(kept->report.tokens_resident),
              static_cast<long long>(kept->report.tokens_seen), largest);
  return largest < 1e-3 && kept->report.tokens_resident < 48 ? 0 : 1;
}
