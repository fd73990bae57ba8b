#include "worker/model/llama_weights.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/llama_group.h"
#include "tests/worker/model/tiny_llama.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig SmallConfig() {
  ModelConfig config;
  config.num_layers = 1;
  config.hidden_size = 64;
  config.num_query_heads = config.num_kv_heads = 2;
  config.head_dim = 32;
  config.ffn_size = 64;
  config.vocab_size = 33;  // the second of two ranks has one row
  config.qkv_bias = true;
  return config;
}

LlamaWeights LaidOut(const ModelConfig& config, int64_t& bytes) {
  const RankShard shard = *MakeRankShard(config, 1, 2);
  return LayOutLlamaWeights(config, shard, {.matrix_bytes = 2, .vector_bytes = 4}, bytes);
}

TEST(LlamaWeightsTest, AMatrixOfOneRowOrColumnIsNoVector) {
  ModelConfig config = SmallConfig();
  config.hidden_size = 1;
  int64_t bytes = 0;
  const LlamaWeights weights = LaidOut(config, bytes);
  EXPECT_EQ(weights.embedding.rows, 1);
  EXPECT_FALSE(weights.embedding.is_vector);
  const LlamaLayer& layer = weights.layers[0];
  EXPECT_EQ(layer.qkv.rows, 96);
  EXPECT_EQ(layer.qkv.cols, 1);
  EXPECT_FALSE(layer.qkv.is_vector);
  EXPECT_TRUE(layer.attn_norm.is_vector);
  EXPECT_TRUE(layer.qkv_bias.is_vector);
  EXPECT_EQ(layer.qkv_bias.rows, 1);
  EXPECT_EQ(layer.qkv_bias.cols, 96);
}

TEST(LlamaWeightsTest, AVocabularyShareOfOneRowHasTheBytesOfAMatrix) {
  int64_t one_row = 0;
  int64_t none = 0;
  LaidOut(SmallConfig(), one_row);
  ModelConfig config = SmallConfig();
  config.vocab_size = 32;
  LaidOut(config, none);
  EXPECT_EQ(one_row - none, 2 * 256) << "embedding and output, 128 bytes each, aligned";
}

std::string Refusal(const GgufWriter& writer) {
  const auto file = OpenGguf(writer.Finish());
  EXPECT_TRUE(file.ok()) << file.status();
  return std::string(LlamaGroup::Create(**file, 1, {}).status().message());
}

TEST(LlamaWeightsTest, RefusesRopeFactorsBesideAScalingAndThoseThatAreNotPositive) {
  const TinyLlama with({.layers = 1, .rope_factors = true}, 1);
  EXPECT_EQ(Refusal(with.Writer()), "");
  EXPECT_THAT(Refusal(with.Writer().Field("llama.rope.scale_linear", 2.0f)),
              AllOf(HasSubstr("'rope_freqs.weight'"), HasSubstr("only one of them")));
  const TinyLlama without({.layers = 1}, 1);
  for (const float value : {0.0f, -1.0f, HUGE_VALF}) {
    std::vector<float> factors(5, 1.0f);
    factors[2] = value;
    EXPECT_THAT(Refusal(without.Writer().Tensor("rope_freqs.weight", 0, 5, factors)),
                HasSubstr("'rope_freqs.weight' has the value"));
  }
}

}  // namespace
}  // namespace heavywater
