// The runner on the real model against tokens and logits of an independent
// implementation (tests/reference/expected_ids.py).
#include "tests/worker/model/real_model.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cache_service/base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/model/full_cache_decoder.h"
#include "tests/worker/model/llama_group.h"
#include "worker/model/model_fingerprint.h"
#include "worker/model/sampler.h"

namespace heavywater {
namespace {

struct ExpectedCase {
  std::string name;
  std::vector<int32_t> prompt;
  std::vector<int32_t> ids;
  std::vector<std::pair<int32_t, double>> first_top;  // of the first step: token, logit
  std::vector<double> best_logits;                    // of every step
};

std::vector<ExpectedCase> ReadExpected() {
  std::ifstream stream(HEAVYWATER_SOURCE_DIR "/tests/reference/expected_ids.json");
  EXPECT_TRUE(stream.good()) << "tests/reference/expected_ids.json is missing";
  std::vector<ExpectedCase> cases;
  const nlohmann::json file = nlohmann::json::parse(stream);
  for (const auto& entry : file.at("cases")) {
    ExpectedCase expected{.name = entry.at("name"),
                          .prompt = entry.at("prompt_ids"),
                          .ids = entry.at("ids"),
                          .first_top = {},
                          .best_logits = entry.at("best_logits")};
    for (const auto& pair : entry.at("first_step_top5")) {
      expected.first_top.emplace_back(pair[0], pair[1]);
    }
    cases.push_back(std::move(expected));
  }
  return cases;
}

// What one rank saw.
struct Generated {
  std::vector<int32_t> ids;
  std::vector<float> first_logits;
  std::vector<float> best_logits;
};

absl::Status Generate(LlamaGroup& group, int rank, const ExpectedCase& expected, Generated& out) {
  FullCacheDecoder decoder(group.runner(rank), group.shape(rank), group.backend(rank));
  HW_ASSIGN_OR_RETURN(Sampler greedy, Sampler::Create({}));
  HW_ASSIGN_OR_RETURN(auto logits, decoder.Feed(expected.prompt, true));
  out.first_logits = logits;
  while (true) {
    HW_ASSIGN_OR_RETURN(const int32_t token, greedy.Sample(logits));
    out.ids.push_back(token);
    out.best_logits.push_back(logits[static_cast<size_t>(token)]);
    if (out.ids.size() == expected.ids.size()) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(logits, decoder.Feed(std::vector<int32_t>{token}, true));
  }
}

class RealLlamaTest : public RealModelTest {
 protected:
  void ExpectTheReferencesTokens(int ranks) {
    auto group = LlamaGroup::Create(*file_, ranks, {});
    ASSERT_TRUE(group.ok()) << group.status();
    const std::vector<ExpectedCase> cases = ReadExpected();
    ASSERT_GE(cases.size(), 3u);
    for (const ExpectedCase& expected : cases) {
      std::vector<Generated> got(static_cast<size_t>(ranks));
      const absl::Status status = (*group)->Run([&](int rank) {
        return Generate(**group, rank, expected, got[static_cast<size_t>(rank)]);
      });
      ASSERT_TRUE(status.ok()) << status;
      for (const Generated& of_rank : got) {
        EXPECT_EQ(of_rank.ids, expected.ids) << expected.name;
        ExpectTheReferencesLogits(of_rank, expected);
      }
    }
  }

 private:
  static void ExpectTheReferencesLogits(const Generated& got, const ExpectedCase& expected) {
    double error = 0;
    for (const auto& [token, logit] : expected.first_top) {
      error = std::max(error, std::fabs(got.first_logits[static_cast<size_t>(token)] - logit));
    }
    for (size_t i = 0; i < expected.best_logits.size(); ++i) {
      error = std::max(error, std::fabs(got.best_logits[i] - expected.best_logits[i]));
    }
    EXPECT_LT(error, 1e-3) << expected.name;
  }
};

TEST_F(RealLlamaTest, OneRankGeneratesTheReferencesTokens) { ExpectTheReferencesTokens(1); }

TEST_F(RealLlamaTest, ThreeRanksGenerateTheReferencesTokens) { ExpectTheReferencesTokens(3); }

TEST_F(RealLlamaTest, TheConfigurationIsThatOfTheModelCard) {
  const auto config = ReadModelConfig(*file_);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_layers, 30);
  EXPECT_EQ(config->hidden_size, 576);
  EXPECT_EQ(config->num_query_heads, 9);
  EXPECT_EQ(config->num_kv_heads, 3);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->ffn_size, 1536);
  EXPECT_EQ(config->vocab_size, 49152);
  EXPECT_EQ(config->context_length, 8192);
  EXPECT_EQ(config->rope_base, 100000);
  EXPECT_NEAR(config->rms_epsilon, 1e-5, 1e-12);
  EXPECT_TRUE(config->tied_embeddings);
}

TEST_F(RealLlamaTest, TheFingerprintTakesLittleCpuTimeAndDoesNotDependOnTheProcess) {
  const std::clock_t start = std::clock();
  const std::string fingerprint = ModelFingerprint(*file_);
  EXPECT_LT(std::clock() - start, 1 * CLOCKS_PER_SEC);
  EXPECT_EQ(fingerprint.size(), std::string("gguf-").size() + 16);
  EXPECT_EQ(fingerprint, ModelFingerprint(**GgufFile::Open(RealModelPath())));
}

}  // namespace
}  // namespace heavywater
