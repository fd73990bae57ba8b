#include "worker/model/cpu_llama_runner.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/full_cache_decoder.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/llama_group.h"
#include "tests/worker/model/tiny_llama.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<GgufFile> OpenBytes(const std::string& bytes) {
  auto opened = OpenGguf(bytes);
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened.ok() ? *std::move(opened) : nullptr;
}

std::vector<int32_t> SomeTokens(int count, int vocab) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + 11) % vocab);
  return tokens;
}

// Logits [tokens][vocab] of every rank; the text is fed in pieces of `piece`.
std::vector<std::vector<float>> RunGroup(LlamaGroup& group, std::span<const int32_t> tokens,
                                         size_t piece) {
  std::vector<std::vector<float>> logits(static_cast<size_t>(group.size()));
  const absl::Status status = group.Run([&](int rank) {
    FullCacheDecoder decoder(group.runner(rank), group.shape(rank), group.backend(rank));
    auto& mine = logits[static_cast<size_t>(rank)];
    for (size_t at = 0; at < tokens.size(); at += piece) {
      HW_ASSIGN_OR_RETURN(
          const auto part,
          decoder.Feed(tokens.subspan(at, std::min(piece, tokens.size() - at)), false));
      mine.insert(mine.end(), part.begin(), part.end());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return logits;
}

// The largest difference, relative to the largest logit.
double Error(const std::vector<float>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double scale = 0;
  double error = 0;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    scale = std::max(scale, std::fabs(want[i]));
    error = std::max(error, std::fabs(got[i] - want[i]));
  }
  return error / scale;
}

struct Case {
  int ranks;
  bool tied;
  bool rope_factors;
  int num_threads;
};

class CpuLlamaRunnerTest : public testing::TestWithParam<Case> {};

TEST_P(CpuLlamaRunnerTest, ComputesTheLogitsOfTheTextbookHoweverTheTextIsFed) {
  const TinyLlama model({.tied = GetParam().tied, .rope_factors = GetParam().rope_factors},
                        /*seed=*/7);
  const auto file = OpenBytes(model.File());
  ASSERT_NE(file, nullptr);
  // 40 rows at once: oneDNN computes them, padded to 64. Pieces of 77 exceed
  // max_batch_tokens and logits' chunks.
  const std::vector<int32_t> tokens = SomeTokens(77, model.shape().vocab);
  const std::vector<double> want = model.Logits(tokens);
  auto group = LlamaGroup::Create(*file, GetParam().ranks,
                                  {.num_threads = GetParam().num_threads, .max_batch_tokens = 40});
  ASSERT_TRUE(group.ok()) << group.status();
  for (const size_t piece : {1u, 3u, 20u, 77u}) {
    const auto logits = RunGroup(**group, tokens, piece);
    for (const auto& of_rank : logits) {
      EXPECT_LT(Error(of_rank, want), 1e-5) << "pieces of " << piece;
      EXPECT_EQ(of_rank, logits[0]) << "ranks differ";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuLlamaRunnerTest,
                         testing::Values(Case{1, true, false, 1}, Case{1, false, true, 2},
                                         Case{3, true, false, 1}, Case{3, false, true, 1},
                                         Case{6, false, false, 1}),
                         [](const auto& info) {
                           return absl::StrCat("Ranks", info.param.ranks,
                                               info.param.tied ? "Tied" : "Untied",
                                               info.param.rope_factors ? "Factors" : "", "Threads",
                                               info.param.num_threads);
                         });

TEST(CpuLlamaRunnerSplitTest, TwoRanksComputeTheSameWhereTwoDivideTheKvHeads) {
  const TinyLlama model({.query_heads = 8, .kv_heads = 4}, /*seed=*/3);
  const auto file = OpenBytes(model.File());
  const std::vector<int32_t> tokens = SomeTokens(30, model.shape().vocab);
  auto group = LlamaGroup::Create(*file, 2, {});
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_LT(Error(RunGroup(**group, tokens, 30)[1], model.Logits(tokens)), 1e-5);
}

TEST(CpuLlamaRunnerSplitTest, MatricesOfOneColumnComputeTheSame) {
  for (const TinyLlamaShape& shape : {TinyLlamaShape{.hidden = 1}, TinyLlamaShape{.ffn = 1}}) {
    const TinyLlama model(shape, /*seed=*/3);
    const auto file = OpenBytes(model.File());
    const std::vector<int32_t> tokens = SomeTokens(30, model.shape().vocab);
    for (const int ranks : {1, 3}) {
      auto group = LlamaGroup::Create(*file, ranks, {});
      ASSERT_TRUE(group.ok()) << group.status();
      for (const auto& logits : RunGroup(**group, tokens, 30)) {
        EXPECT_LT(Error(logits, model.Logits(tokens)), 1e-5);
      }
    }
  }
}

TEST(CpuLlamaRunnerSplitTest, RefusesARankCountThatDoesNotFitTheKvHeadsNamingBoth) {
  const auto file = OpenBytes(TinyLlama({}, 1).File());
  const auto group = LlamaGroup::Create(*file, 2, {});
  EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(group.status().message(), HasSubstr("2 ranks"));
  EXPECT_THAT(group.status().message(), HasSubstr("3 KV heads"));
}

TEST(CpuLlamaRunnerSplitTest, EachRankHoldsOnlyItsShareOfTheWeights) {
  const auto file = OpenBytes(TinyLlama({.ffn = 1536, .vocab = 3072}, 1).File());
  auto whole = LlamaGroup::Create(*file, 1, {.max_batch_tokens = 1});
  auto split = LlamaGroup::Create(*file, 3, {.max_batch_tokens = 1});
  ASSERT_TRUE(whole.ok() && split.ok());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_LT((*split)->runner(rank).device_bytes(), (*whole)->runner(0).device_bytes() * 0.35);
  }
}

TEST(CpuLlamaRunnerBatchTest, ATokenGetsTheSameLogitsAloneAndInASmallBatch) {
  const TinyLlama model({}, /*seed=*/5);
  const auto file = OpenBytes(model.File());
  auto group = LlamaGroup::Create(*file, 1, {});
  ASSERT_TRUE(group.ok()) << group.status();
  CpuLlamaRunner& runner = (*group)->runner(0);
  Backend& backend = (*group)->backend(0);
  Stream stream;
  const auto last_logits = [&](const std::vector<int32_t>& tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    auto hidden = backend.Allocate(count * runner.hidden_size() * 4);
    auto logits = backend.Allocate(count * runner.vocab_size() * 4);
    EXPECT_TRUE(runner.Embed(tokens, hidden->As<float>(), stream).ok());
    EXPECT_TRUE(runner.ComputeLogits(hidden->As<float>(), logits->As<float>(), stream).ok());
    const float* row = logits->As<float>().device_address() + (count - 1) * runner.vocab_size();
    return std::vector<float>(row, row + runner.vocab_size());
  };
  const std::vector<float> alone = last_logits({42});
  for (const int count : {2, 3, 4, 7, 8, 16}) {
    std::vector<int32_t> tokens = SomeTokens(count, runner.vocab_size());
    tokens.back() = 42;
    EXPECT_EQ(last_logits(tokens), alone) << count << " tokens";
  }
}

TEST(CpuLlamaRunnerErrorTest, RefusesATokenOutsideTheVocabulary) {
  const auto file = OpenBytes(TinyLlama({}, 1).File());
  auto group = LlamaGroup::Create(*file, 1, {});
  ASSERT_TRUE(group.ok());
  CpuLlamaRunner& runner = (*group)->runner(0);
  auto hidden = (*group)->backend(0).Allocate(runner.hidden_size() * 4);
  Stream stream;
  for (const int32_t token : {-1, 100}) {
    const absl::Status status =
        runner.Embed(std::vector<int32_t>{token}, hidden->As<float>(), stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("token is ", token)));
  }
}

TEST(CpuLlamaRunnerErrorTest, RefusesATensorThatItWouldHaveToIgnore) {
  GgufWriter writer = TinyLlama({}, 1).Writer();
  writer.Tensor("blk.0.attn_q.bias", 0, 60, std::vector<float>(60));
  const auto group = LlamaGroup::Create(*OpenBytes(writer.Finish()), 1, {});
  EXPECT_EQ(group.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(group.status().message(), HasSubstr("'blk.0.attn_q.bias'"));
}

TEST(CpuLlamaRunnerErrorTest, NamesATensorOfAnotherShape) {
  std::string file = TinyLlama({.layers = 1}, 1).File();
  // The dimension 136 (the feed-forward) of the first tensor that has it.
  const size_t at = file.find("blk.0.ffn_gate.weight") + 21 + 4 + 8;
  ASSERT_EQ(file[at], static_cast<char>(136));
  file[at] = static_cast<char>(135);
  const auto group = LlamaGroup::Create(*OpenBytes(file), 1, {});
  EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(group.status().message(),
              HasSubstr("'blk.0.ffn_gate.weight' is 135 x 48, want 136 x 48"));
}

TEST(CpuLlamaRunnerErrorTest, RefusesOptionsThatCannotWorkNamingThem) {
  const auto file = OpenBytes(TinyLlama({}, 1).File());
  EXPECT_THAT(LlamaGroup::Create(*file, 1, {.num_threads = 0}).status().message(),
              HasSubstr("num_threads is 0"));
  EXPECT_THAT(LlamaGroup::Create(*file, 1, {.max_batch_tokens = 0}).status().message(),
              HasSubstr("max_batch_tokens is 0"));
}

}  // namespace
}  // namespace heavywater
