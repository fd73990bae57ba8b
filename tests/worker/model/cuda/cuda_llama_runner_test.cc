// The runner's kernels and their order, against the textbook. The shim runs threads in
// several orders and queued work as late as CUDA may, so a missing barrier or wait
// would show; memory that nobody wrote holds NaNs.
#include "worker/model/cuda/cuda_llama_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "tests/worker/model/cuda/plain_matmul.h"
#include "tests/worker/model/full_cache_decoder.h"
#include "tests/worker/model/tiny_checkpoint.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/comm/staged/staged_communicator.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

std::vector<int32_t> SomeTokens(int count, int vocab) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + 11) % vocab);
  return tokens;
}

// One rank: backend, communicator and runner.
struct Rank {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<CudaLlamaRunner> runner;
};

absl::StatusOr<Rank> MakeRank(const ModelFile& file, std::unique_ptr<Communicator> host,
                              const CudaLlamaOptions& options) {
  Rank rank;
  HW_ASSIGN_OR_RETURN(rank.backend, CreateCudaBackend({}));
  rank.comm = std::make_unique<StagedCommunicator>(std::move(host), *rank.backend);
  HW_ASSIGN_OR_RETURN(rank.runner, CudaLlamaRunner::Create(file, *rank.comm, *rank.backend,
                                                           CreatePlainMatmul(), options));
  return rank;
}

// Logits [tokens][vocab] of rank `index`, the text fed in pieces.
absl::StatusOr<std::vector<float>> ComputeLogits(Rank& rank, std::span<const int32_t> tokens,
                                                 size_t piece) {
  const KvShape shape = MakeKvShape(rank.runner->config(), rank.runner->shard(), KvShape{});
  FullCacheDecoder decoder(*rank.runner, shape, *rank.backend);
  std::vector<float> logits;
  for (size_t at = 0; at < tokens.size(); at += piece) {
    HW_ASSIGN_OR_RETURN(
        const auto part,
        decoder.Feed(tokens.subspan(at, std::min(piece, tokens.size() - at)), false));
    logits.insert(logits.end(), part.begin(), part.end());
  }
  return logits;
}

// The largest difference, relative to the largest logit.
double Error(const std::vector<float>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double scale = 0;
  double error = 0;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    scale = std::max(scale, std::fabs(want[i]));
    // NaN must not pass as no difference.
    error = got[i] == got[i] ? std::max(error, std::fabs(got[i] - want[i])) : INFINITY;
  }
  return error / scale;
}

struct Case {
  int ranks;
  WeightType weights;
  cuda_shim::Progress progress;
  cuda_shim::Order order;
  bool tied;
  double tolerance;
};

class CudaLlamaRunnerTest : public ::testing::TestWithParam<Case> {
 protected:
  CudaLlamaRunnerTest() {
    cuda_shim::SetOptions({.order = GetParam().order, .progress = GetParam().progress});
  }
  ~CudaLlamaRunnerTest() override {
    EXPECT_EQ(cuda_shim::TakeFailure(), "");
    cuda_shim::SetOptions({});
  }
};

TEST_P(CudaLlamaRunnerTest, ComputesTheLogitsOfTheTextbookHoweverTheTextIsFed) {
  const TinyLlama model({.tied = GetParam().tied, .rope_factors = !GetParam().tied}, /*seed=*/7);
  const auto file = OpenGguf(model.File());
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<int32_t> tokens = SomeTokens(21, model.shape().vocab);
  const std::vector<double> want = model.Logits(tokens);
  for (const size_t piece : {1u, 21u}) {  // 21 rows exceed max_batch_tokens
    auto comms = CreateLocalGroup(GetParam().ranks, absl::Seconds(120));
    std::vector<std::vector<float>> logits(comms.size());
    std::vector<Rank> ranks(comms.size());  // they leave together
    std::vector<std::thread> threads;
    for (size_t index = 0; index < comms.size(); ++index) {
      threads.emplace_back([&, index] {
        auto rank = MakeRank(**file, std::move(comms[index]),
                             {.max_batch_tokens = 8, .weights = GetParam().weights});
        ASSERT_TRUE(rank.ok()) << rank.status();
        ranks[index] = *std::move(rank);
        auto computed = ComputeLogits(ranks[index], tokens, piece);
        ASSERT_TRUE(computed.ok()) << computed.status();
        logits[index] = *std::move(computed);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& of_rank : logits) {
      EXPECT_LT(Error(of_rank, want), GetParam().tolerance) << "pieces of " << piece;
      EXPECT_EQ(of_rank, logits[0]) << "ranks differ";
    }
  }
}

constexpr auto kAtOnce = cuda_shim::Progress::kAtOnce;
constexpr auto kLate = cuda_shim::Progress::kLate;
constexpr auto kAnyTime = cuda_shim::Progress::kRandom;
constexpr auto kForward = cuda_shim::Order::kForward;
constexpr auto kReverse = cuda_shim::Order::kReverse;
constexpr auto kAnyOrder = cuda_shim::Order::kRandom;
INSTANTIATE_TEST_SUITE_P(
    All, CudaLlamaRunnerTest,
    ::testing::Values(Case{1, WeightType::kFloat32, kAtOnce, kForward, true, 1e-5},
                      Case{1, WeightType::kFloat32, kLate, kReverse, false, 1e-5},
                      Case{1, WeightType::kBFloat16, kLate, kAnyOrder, true, 0.02},
                      Case{3, WeightType::kFloat32, kLate, kReverse, true, 1e-5},
                      Case{3, WeightType::kBFloat16, kAnyTime, kForward, false, 0.02}),
    [](const auto& info) { return absl::StrCat("Case", info.index, "Ranks", info.param.ranks); });

// Biases, norms of heads, scaled RoPE.
TEST(CudaLlamaRunnerCheckpointTest, GivesTheLogitsOfTransformersForEveryArchitecture) {
  cuda_shim::SetOptions({.order = kReverse, .progress = kLate});
  for (const TinyCheckpoint& checkpoint : RecordedCheckpoints()) {
    SCOPED_TRACE(checkpoint.name());
    const TemporaryFolder folder;
    checkpoint.WriteFolder(folder);
    const auto file = OpenModel(folder.path());
    ASSERT_TRUE(file.ok()) << file.status();
    auto rank = MakeRank(**file, std::move(CreateLocalGroup(1, absl::Seconds(60)).front()),
                         {.max_batch_tokens = 8, .weights = WeightType::kFloat32});
    ASSERT_TRUE(rank.ok()) << rank.status();
    const auto logits = ComputeLogits(*rank, checkpoint.tokens(), 7);
    ASSERT_TRUE(logits.ok()) << logits.status();
    const auto want = checkpoint.logits();
    const size_t vocab = want[0].size();
    const size_t first = logits->size() - want.size() * vocab;
    for (size_t i = 0; i < want.size() * vocab; ++i) {
      ASSERT_NEAR((*logits)[first + i], want[i / vocab][i % vocab], 1e-3) << "logit " << i;
    }
  }
  EXPECT_EQ(cuda_shim::TakeFailure(), "");
  cuda_shim::SetOptions({});
}

TEST(CudaLlamaRunnerOptionsTest, RefusesABatchAndATokenOutOfRange) {
  const TinyLlama model({}, 1);
  const auto file = OpenGguf(model.File());
  ASSERT_TRUE(file.ok()) << file.status();
  const auto local = [] { return std::move(CreateLocalGroup(1, absl::Seconds(60)).front()); };
  EXPECT_THAT(std::string(MakeRank(**file, local(), {.max_batch_tokens = 0}).status().message()),
              HasSubstr("max_batch_tokens is 0"));
  auto rank = MakeRank(**file, local(), {.weights = WeightType::kFloat32});
  ASSERT_TRUE(rank.ok()) << rank.status();
  Stream stream;
  auto hidden = rank->backend->Allocate(model.shape().hidden * sizeof(float));
  ASSERT_TRUE(hidden.ok());
  const int32_t outside[] = {100};
  EXPECT_THAT(std::string(rank->runner->Embed(outside, hidden->As<float>(), stream).message()),
              HasSubstr("token is 100, want 0 or more and less than 100"));
}

TEST(CudaLlamaRunnerMemoryTest, HoldsWhatThePlanSays) {
  const TinyLlama model({.ffn = 1536, .vocab = 3072}, 1);
  const auto file = OpenGguf(model.File());
  ASSERT_TRUE(file.ok()) << file.status();
  auto rank = MakeRank(**file, std::move(CreateLocalGroup(1, absl::Seconds(60)).front()),
                       {.max_batch_tokens = 16});
  ASSERT_TRUE(rank.ok()) << rank.status();
  const CudaLlamaRunner& runner = *rank->runner;
  EXPECT_EQ(runner.device_bytes(),
            CudaRunnerWeightBytes(runner.config(), runner.shard()) +
                CudaRunnerWorkspaceBytes(runner.config(), runner.shard(), 16));
}

}  // namespace
}  // namespace heavywater
