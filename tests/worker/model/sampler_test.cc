#include "worker/model/sampler.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

int32_t Draw(Sampler& sampler, const std::vector<float>& logits) {
  const auto token = sampler.Sample(logits);
  EXPECT_TRUE(token.ok()) << token.status();
  return token.ok() ? *token : -1;
}

TEST(SamplerTest, GreedyTakesTheHighestAndTheLowerTokenOfEqualsAndDrawsNothing) {
  Sampler sampler = *Sampler::Create({});
  EXPECT_EQ(Draw(sampler, {1, 3, 2, 3}), 1);
  EXPECT_EQ(Draw(sampler, {-5, -kInfinity, -5}), 0);
  EXPECT_EQ(sampler.state().draws, 0u);
}

TEST(SamplerTest, TokensComeAsOftenAsTheirProbabilitySays) {
  const std::vector<float> logits = {0, 1, 2, -kInfinity, 0.5f};
  const double temperature = 0.7;
  Sampler sampler = *Sampler::Create({.temperature = temperature, .seed = 11});
  constexpr int kDraws = 200000;
  std::vector<int> counts(logits.size());
  for (int i = 0; i < kDraws; ++i) ++counts[static_cast<size_t>(Draw(sampler, logits))];
  double total = 0;
  for (const float logit : logits) total += std::exp(logit / temperature);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double want = std::exp(logits[i] / temperature) / total;
    // Five standard deviations of a binomial.
    EXPECT_NEAR(counts[i] / double{kDraws}, want, 5 * std::sqrt(want * (1 - want) / kDraws) + 1e-9)
        << "token " << i;
  }
}

// How often each token comes in 20,000 draws.
std::vector<int> Counts(const SamplerOptions& options, const std::vector<float>& logits) {
  Sampler sampler = *Sampler::Create(options);
  std::vector<int> counts(logits.size());
  for (int i = 0; i < 20000; ++i) ++counts[static_cast<size_t>(Draw(sampler, logits))];
  return counts;
}

TEST(SamplerTest, TopKLeavesTheLikeliestInTheirProportionTiesToTheLowerToken) {
  const std::vector<float> logits = {0, std::log(3.0f), -1, 0, -kInfinity};
  const std::vector<int> counts = Counts({.temperature = 1, .top_k = 2, .seed = 3}, logits);
  EXPECT_NEAR(counts[1], 15000, 400);
  EXPECT_EQ(counts[0] + counts[1], 20000) << "token 0 before its equal, 3";
  EXPECT_EQ(Counts({.temperature = 1, .top_k = 9, .seed = 3}, logits),
            Counts({.temperature = 1, .seed = 3}, logits));
}

TEST(SamplerTest, TopPLeavesTheFewestThatHaveTheProbabilityTogether) {
  // Probabilities .1, .4, .3, .2.
  const std::vector<float> logits = {std::log(1.0f), std::log(4.0f), std::log(3.0f),
                                     std::log(2.0f)};
  const auto seen = [&](double top_p, int top_k) {
    std::vector<int> tokens;
    const auto counts =
        Counts({.temperature = 1, .top_p = top_p, .top_k = top_k, .seed = 3}, logits);
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) tokens.push_back(static_cast<int>(i));
    }
    return tokens;
  };
  EXPECT_EQ(seen(0.39, 0), (std::vector<int>{1}));
  EXPECT_EQ(seen(0.69, 0), (std::vector<int>{1, 2}));
  EXPECT_EQ(seen(0.71, 0), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(seen(1e-9, 0), (std::vector<int>{1}));
  // Of the best three token 1 has 4/9, with token 2 it is 7/9.
  EXPECT_EQ(seen(0.7, 3), (std::vector<int>{1, 2}));
  EXPECT_EQ(seen(0.8, 3), (std::vector<int>{1, 2, 3}));
}

TEST(SamplerTest, LimitsThatLeaveAllDrawTheSameTokensAsNone) {
  const std::vector<float> logits = {0.3f, 1, -2, 0.7f, 0.7f};
  Sampler plain = *Sampler::Create({.temperature = 0.8, .seed = 4});
  Sampler all = *Sampler::Create({.temperature = 0.8, .top_p = 1, .top_k = 5, .seed = 4});
  for (int i = 0; i < 200; ++i) EXPECT_EQ(Draw(plain, logits), Draw(all, logits));
}

TEST(SamplerTest, RefusesLimitsThatCannotWorkNamingThem) {
  const auto message = [](const SamplerOptions& options) {
    return std::string(Sampler::Create(options).status().message());
  };
  EXPECT_THAT(message({.top_p = 0}), HasSubstr("top_p is 0, want above 0 and at most 1"));
  EXPECT_THAT(message({.top_p = 1.5}), HasSubstr("top_p is 1.5"));
  EXPECT_THAT(message({.top_p = std::nan("")}), HasSubstr("top_p is nan"));
  EXPECT_THAT(message({.top_k = -1}), HasSubstr("top_k is -1, want 0 or more"));
}

TEST(SamplerTest, TheRandomNumbersNeverChange) {
  // SplitMix64's output function; values computed independently (Python).
  EXPECT_EQ(UniformAt(0, 0), 0x1.4e0dba5e9a32fp-1);
  EXPECT_EQ(UniformAt(42, 7), 0x1.782d47a99890cp-1);
  EXPECT_NE(UniformAt(1, 0), UniformAt(0, 1));
}

TEST(SamplerTest, GoesOnFromARestoredStateAsIfNothingHadHappened) {
  const std::vector<float> logits(50, 0.0f);
  Sampler sampler = *Sampler::Create({.temperature = 1, .seed = 5});
  for (int i = 0; i < 10; ++i) Draw(sampler, logits);
  const SamplerState state = sampler.state();
  EXPECT_EQ(state, (SamplerState{.seed = 5, .draws = 10}));
  Sampler restored = *Sampler::Create({.temperature = 1, .seed = 0});
  restored.Restore(state);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Draw(restored, logits), Draw(sampler, logits));
}

TEST(SamplerTest, ATinyTemperatureIsGreedy) {
  Sampler sampler = *Sampler::Create({.temperature = 1e-300, .seed = 1});
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Draw(sampler, {0.999f, 1.0f, 0.5f}), 1);
}

TEST(SamplerTest, RefusesLogitsThatAreNoNumbersAndDrawsNothing) {
  Sampler sampler = *Sampler::Create({.temperature = 1});
  for (const std::vector<float>& logits :
       {std::vector<float>{0, NAN}, {0, kInfinity}, {-kInfinity, -kInfinity}, {}}) {
    EXPECT_EQ(sampler.Sample(logits).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(sampler.Sample(std::vector<float>{0, NAN}).status().message(), HasSubstr("token 1"));
  EXPECT_EQ(sampler.state().draws, 0u);
}

TEST(SamplerTest, RefusesATemperatureThatCannotWork) {
  for (const double temperature : {-0.1, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const auto sampler = Sampler::Create({.temperature = temperature});
    EXPECT_EQ(sampler.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(sampler.status().message(), HasSubstr("temperature"));
  }
}

}  // namespace
}  // namespace heavywater
