#include "worker/model/model_config.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/model/model_fingerprint.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ModelConfigTest, ReadsTheSizes) {
  const auto config = ReadModelConfig(**OpenGguf(TinyLlama({.tied = false}, 1).File()));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->name, "tiny");
  EXPECT_EQ(config->num_layers, 2);
  EXPECT_EQ(config->num_query_heads, 6);
  EXPECT_EQ(config->num_kv_heads, 3);
  EXPECT_EQ(config->head_dim, 10);
  EXPECT_EQ(config->vocab_size, 100);
  EXPECT_FALSE(config->tied_embeddings);
}

TEST(ModelConfigTest, NamesWhatItCannotCompute) {
  const auto message = [](const GgufWriter& writer) {
    return std::string(ReadModelConfig(**OpenGguf(writer.Finish())).status().message());
  };
  EXPECT_THAT(message(GgufWriter().Field("general.architecture", "gpt2")),
              AllOf(HasSubstr("'general.architecture' is 'gpt2'"),
                    HasSubstr("want one of llama, mistral, qwen2, qwen3")));
  const TinyLlama model({}, 1);
  EXPECT_THAT(message(model.Writer().Field("llama.expert_count", uint32_t{8})),
              HasSubstr("'llama.expert_count' is 8"));
  EXPECT_THAT(message(model.Writer().Field("llama.rope.scaling.type", "longrope")),
              AllOf(HasSubstr("'llama.rope.scaling.type' is 'longrope'"),
                    HasSubstr("want one of none, linear, llama3, yarn")));
  EXPECT_THAT(message(model.Writer().Field("llama.rope.scaling.type", "linear")),
              HasSubstr("'llama.rope.scaling.factor' is missing"));
  EXPECT_THAT(message(model.Writer()
                          .Field("llama.rope.scaling.type", "linear")
                          .Field("llama.rope.scaling.factor", 0.5f)),
              HasSubstr("the factor of 'llama.rope.scaling' is 0.5"));
  EXPECT_THAT(message(model.Writer().Field("llama.rope.dimension_count", uint32_t{8})),
              HasSubstr("'llama.rope.dimension_count' is 8, want the head size, 10"));
  EXPECT_THAT(message(model.Writer().Field("llama.vocab_size", uint32_t{99})),
              HasSubstr("'llama.vocab_size' is 99"));
  EXPECT_THAT(message(TinyLlama({.query_heads = 5}, 1).Writer()),
              HasSubstr("'llama.attention.head_count' is 5"));
  EXPECT_THAT(message(TinyLlama({.head_dim = 9}, 1).Writer()), HasSubstr("an even number"));
}

TEST(ModelConfigTest, ServesNoMorePositionsThanASlidingWindowHas) {
  const auto context = [](const GgufWriter& writer) {
    return ReadModelConfig(**OpenGguf(writer.Finish()))->context_length;
  };
  const TinyLlama model({}, 1);
  EXPECT_EQ(context(model.Writer()), 64);
  EXPECT_EQ(context(model.Writer().Field("llama.attention.sliding_window", uint32_t{40})), 40);
  EXPECT_EQ(context(model.Writer().Field("llama.attention.sliding_window", uint32_t{400})), 64);
}

GgufWriter Yarn() {
  return TinyLlama({}, 1)
      .Writer()
      .Field("llama.rope.scaling.type", "yarn")
      .Field("llama.rope.scaling.factor", 2.0f);
}

TEST(ModelConfigTest, AScalingStretchesTheWholeContextNotTheSlidingWindow) {
  const auto config = ReadModelConfig(
      **OpenGguf(Yarn().Field("llama.attention.sliding_window", uint32_t{40}).Finish()));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->context_length, 40);
  EXPECT_EQ(config->rope_scaling.original_context, 64);
}

TEST(ModelConfigTest, RefusesWhatAScalingAddsUnlessItChangesNothing) {
  const auto message = [](const char* field, float value) {
    const std::string name = std::string("llama.rope.scaling.") + field;
    return std::string(
        ReadModelConfig(**OpenGguf(Yarn().Field(name, value).Finish())).status().message());
  };
  EXPECT_EQ(message("yarn_ext_factor", 1), "");
  EXPECT_EQ(message("yarn_ext_factor", -1), "");
  EXPECT_THAT(message("yarn_ext_factor", 0), HasSubstr("yarn_ext_factor' is 0, want 1"));
  EXPECT_THAT(message("yarn_attn_factor", 2), HasSubstr("yarn_attn_factor' is 2, want 1"));
  EXPECT_THAT(message("yarn_log_multiplier", 0.5), HasSubstr("is 0.5, want 0"));
}

TEST(ModelConfigTest, RefusesANameThatIsNoText) {
  const auto message = [](const std::string& name) {
    const auto file = OpenGguf(
        GgufWriter().Field("general.architecture", "llama").Field("general.name", name).Finish());
    return std::string(ReadModelConfig(**file).status().message());
  };
  EXPECT_THAT(message("a\xff"), HasSubstr("'general.name' is not UTF-8 at byte 1"));
  EXPECT_THAT(message(std::string((1 << 20) + 1, 'a')), HasSubstr("'general.name' has 1048577"));
}

TEST(ModelConfigTest, ReadsRopeScalingAlsoAsOldFilesSayIt) {
  const TinyLlama model({}, 1);
  const auto config =
      ReadModelConfig(**OpenGguf(model.Writer().Field("llama.rope.scale_linear", 4.0f).Finish()));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(config->rope_scaling.factor, 4);
}

TEST(ModelFingerprintTest, DiffersWhenAFieldOrATensorDiffers) {
  const TinyLlama model({.layers = 1}, 1);
  const auto fingerprint = [](const std::string& bytes) {
    return ModelFingerprint(**OpenGguf(bytes));
  };
  const std::string whole = model.File();
  EXPECT_EQ(fingerprint(whole), fingerprint(model.File()));
  EXPECT_NE(fingerprint(whole), fingerprint(TinyLlama({.layers = 1}, 2).File()));
  EXPECT_NE(fingerprint(whole), fingerprint(model.Writer().Field("x", true).Finish()));
  std::string last_byte = whole;
  last_byte.back() = static_cast<char>(last_byte.back() ^ 1);
  EXPECT_NE(fingerprint(whole), fingerprint(last_byte));
}

}  // namespace
}  // namespace heavywater
