// Policies over a trace, against a few lines of plain arithmetic.
#include "worker/replay/replay.h"

#include <cmath>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/replay/replay_json.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int kHeadDim = 16;
constexpr int64_t kPrompt = 60;
constexpr int64_t kTokens = 90;

Trace RandomTrace() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Trace trace;
  trace.shape = {.num_layers = 2,
                 .num_query_heads = 4,
                 .num_kv_heads = 2,
                 .head_dim = kHeadDim,
                 .num_tokens = kTokens,
                 .prompt_tokens = kPrompt};
  for (int layer = 0; layer < 2; ++layer) {
    TraceLayer rows;
    for (auto* part : {&rows.q, &rows.k, &rows.v}) {
      part->resize(kTokens * kHeadDim * (part == &rows.q ? 4 : 2));
      for (float& x : *part) x = 1.5f * normal(random);
    }
    trace.layers.push_back(std::move(rows));
  }
  return trace;
}

PolicyOptions Bounded(Policy policy, Scope scope = Scope::kKvHead) {
  PolicyOptions options;
  options.policy = policy;
  options.scope = scope;
  options.heavy_tokens = 10;
  options.recent_tokens = 6;
  return options;
}

ReplayFigures Figures(const PolicyOptions& policy) {
  const auto figures = Replay(RandomTrace(), policy, {.num_threads = 1, .page_tokens = 32});
  EXPECT_TRUE(figures.ok()) << figures.status();
  return figures.value_or(ReplayFigures{});
}

// The attention that the newest 16 and the token itself hold, in full.
double MassOfAWindow() {
  const Trace trace = RandomTrace();
  double sum = 0;
  for (int layer = 0; layer < 2; ++layer) {
    for (int64_t token = kPrompt; token < kTokens; ++token) {
      for (int head = 0; head < 4; ++head) {
        double all = 0, window = 0;
        for (int64_t p = 0; p <= token; ++p) {
          double dot = 0;
          for (int i = 0; i < kHeadDim; ++i) {
            dot += double{trace.layers[layer].q[(token * 4 + head) * kHeadDim + i]} *
                   trace.layers[layer].k[(p * 2 + head / 2) * kHeadDim + i];
          }
          const double weight = std::exp(dot / 4);
          all += weight;
          if (p >= token - 16) window += weight;
        }
        sum += window / all / (2 * 4 * static_cast<double>(kTokens - kPrompt));
      }
    }
  }
  return sum;
}

TEST(ReplayTest, TheFullCacheMissesNothing) {
  const ReplayFigures full = Figures(Bounded(Policy::kFull));
  EXPECT_EQ(full.queries, (kTokens - kPrompt) * 2 * 4);
  EXPECT_NEAR(full.mass_kept, 1, 1e-9);
  EXPECT_NEAR(full.error, 0, 1e-5);
  EXPECT_EQ(full.agreement, 1);
  EXPECT_EQ(full.tokens_resident, kTokens);
}

TEST(ReplayTest, AWindowKeepsWhatAWindowHolds) {
  PolicyOptions streaming = Bounded(Policy::kStreaming);
  streaming.sink_tokens = 0;
  const ReplayFigures figures = Figures(streaming);
  EXPECT_NEAR(figures.mass_kept, MassOfAWindow(), 1e-9);
  EXPECT_GT(figures.error, 0.1);
  EXPECT_LT(figures.agreement, 1);
  EXPECT_EQ(figures.tokens_resident, 16);
  EXPECT_LT(figures.device_bytes, figures.full_cache_bytes);
}

TEST(ReplayTest, NoPolicyKeepsMoreThanTheOracleAndRecallOfAllMissesNothing) {
  PolicyOptions oracle = Bounded(Policy::kOracle);
  oracle.recent_tokens = 1;
  oracle.heavy_tokens = 15;
  const ReplayFigures best = Figures(oracle);
  EXPECT_LT(best.mass_kept, 1);
  for (const Policy policy : {Policy::kStreaming, Policy::kH2o, Policy::kSnapKvH2o}) {
    EXPECT_LT(Figures(Bounded(policy)).mass_kept, best.mass_kept) << PolicyName(policy);
  }
  PolicyOptions recall = Bounded(Policy::kSnapKvH2o);
  recall.recall.enabled = true;
  recall.recall.recall_tokens = 90;
  recall.recall.min_share = 0;
  const ReplayFigures all = Figures(recall);
  EXPECT_GT(all.mass_kept, 0.999);
  EXPECT_LT(all.error, 1e-3);
}

TEST(ReplayTest, ATraceThatEndsWithItsPromptIsRefused) {
  Trace trace = RandomTrace();
  trace.shape.prompt_tokens = kTokens;
  const auto figures = Replay(trace, Bounded(Policy::kH2o), {});
  EXPECT_EQ(figures.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(figures.status().message()), HasSubstr("prompt_tokens is 90"));
}

TEST(ReplayTest, RequestsInJsonAreAnsweredOrRefusedByName) {
  const std::string path = ::testing::TempDir() + "/replay_test.trace";
  ASSERT_TRUE(WriteTrace(path, RandomTrace()).ok());
  const auto answer = AnswerReplayRequest(R"({"trace": ")" + path +
                                          R"(", "page_tokens": 32, "policies": [{"policy": "full"},
         {"policy": "h2o", "scope": "kv_head", "heavy_tokens": 10, "recent_tokens": 6}]})");
  ASSERT_TRUE(answer.ok()) << answer.status();
  const nlohmann::json& rows = answer->at("rows");
  EXPECT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1].at("policy"), "h2o");
  EXPECT_EQ(rows[1].at("mass_kept"), Figures(Bounded(Policy::kH2o)).mass_kept);
  EXPECT_EQ(answer->at("trace").at("num_tokens"), kTokens);

  const auto refused = [](const std::string& text) {
    return std::string(AnswerReplayRequest(text).status().message());
  };
  EXPECT_THAT(refused("[]"), HasSubstr("no JSON object"));
  EXPECT_THAT(refused(R"({"trace": "x"})"), HasSubstr("policies"));
  EXPECT_THAT(refused(R"({"trace": "x", "policies": []})"), HasSubstr("policies is no list"));
  EXPECT_THAT(refused(R"({"trace": "x", "policies": [{"policy": "lru"}]})"), HasSubstr("lru"));
  EXPECT_THAT(refused(R"({"trace": "/nowhere", "policies": [{"policy": "h2o"}]})"),
              HasSubstr("cannot read /nowhere"));
}

}  // namespace
}  // namespace heavywater
