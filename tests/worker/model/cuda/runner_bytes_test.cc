#include "worker/model/cuda/runner_bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace heavywater {
namespace {

// Llama-3-8B.
ModelConfig EightBillion() {
  ModelConfig config;
  config.num_layers = 32;
  config.hidden_size = 4096;
  config.num_query_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.ffn_size = 14336;
  config.vocab_size = 128256;
  config.tied_embeddings = false;
  return config;
}

TEST(RunnerBytesTest, WeightsOfALlama8BAreTwoBytesAParameterAndSplitOverRanks) {
  const ModelConfig config = EightBillion();
  const int64_t parameters = 8'030'261'248;
  const int64_t whole = CudaRunnerWeightBytes(config, *MakeRankShard(config, 0, 1));
  EXPECT_GE(whole, 2 * parameters);
  EXPECT_LT(whole, 2 * parameters + (int64_t{2} << 20));  // norms are float32; alignment
  const int64_t quarter = CudaRunnerWeightBytes(config, *MakeRankShard(config, 3, 4));
  EXPECT_NEAR(static_cast<double>(quarter), whole / 4.0, whole * 0.001);
  EXPECT_NEAR(static_cast<double>(CudaRunnerWeightBytes(config, *MakeRankShard(config, 0, 1),
                                                        WeightType::kFloat32)),
              2.0 * whole, 2e6);
}

TEST(RunnerBytesTest, TheWorkspaceGrowsWithTheBatchAndHoldsTheMatrixProductsScratch) {
  const ModelConfig config = EightBillion();
  const RankShard shard = *MakeRankShard(config, 0, 1);
  const int64_t one = CudaRunnerWorkspaceBytes(config, shard, 1);
  const int64_t many = CudaRunnerWorkspaceBytes(config, shard, 512);
  EXPECT_GT(one, kMatmulScratchBytes);
  // Per token at least gate and up, Q, K and V, and a sum in float32.
  EXPECT_GT(many - one, 511 * 4 * (2 * 14336 + 6144 + 4096));
  EXPECT_LT(many, int64_t{512} << 20);
}

TEST(RunnerBytesTest, PlacesAreAlignedAndDoNotOverlap) {
  const ModelConfig config = EightBillion();
  const RankShard shard = *MakeRankShard(config, 1, 8);
  const RunnerWorkspace places = LayOutRunnerWorkspace(config, shard, 7, WeightType::kBFloat16);
  const int64_t order[] = {places.normed,  places.attention, places.inner,  places.qkv,
                           places.gate_up, places.partial,   places.logits, places.gathered,
                           places.rows,    places.cosines,   places.sines,  places.matmul,
                           places.bytes};
  const int64_t sizes[] = {7 * 4096 * 2, 7 * 512 * 2, 7 * 1792 * 2};
  for (size_t i = 0; i + 1 < std::size(order); ++i) {
    EXPECT_EQ(order[i] % 256, 0);
    EXPECT_LT(order[i], order[i + 1]);
    if (i >= std::size(sizes)) continue;
    EXPECT_GE(order[i + 1] - order[i], sizes[i]);
  }
}

TEST(ParseWeightTypeTest, NamesBothTypesWhenItKnowsNeither) {
  EXPECT_EQ(*ParseWeightType("fp32"), WeightType::kFloat32);
  EXPECT_EQ(*ParseWeightType("bf16"), WeightType::kBFloat16);
  EXPECT_THAT(std::string(ParseWeightType("fp8").status().message()),
              ::testing::HasSubstr("'fp8', want one of fp32, bf16"));
}

}  // namespace
}  // namespace heavywater
