#include "worker/model/transformers_config.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

// As Llama 2 has it, small.
Json Config(const Json& changes) {
  Json json = Json::parse(R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      "vocab_size": 100, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
      "hidden_act": "silu"})");
  json.update(changes);
  return json;
}

std::string Message(const Json& changes) {
  return std::string(ParseTransformersConfig(Config(changes), true).status().message());
}

TEST(TransformersConfigTest, ReadsSizesAndTakesTheUsualValueForWhatIsNotThere) {
  const auto config = ParseTransformersConfig(Config(Json::object()), /*has_output=*/true);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->num_kv_heads, 2);
  EXPECT_EQ(config->rope_base, 10000);
  EXPECT_EQ(config->context_length, 4096);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_EQ(config->rotary_rows, RotaryRows::kHalves);
  EXPECT_TRUE(ParseTransformersConfig(Config(Json::object()), false)->tied_embeddings);
  EXPECT_TRUE(
      ParseTransformersConfig(Config({{"tie_word_embeddings", true}}), true)->tied_embeddings);
}

TEST(TransformersConfigTest, ReadsRopeAsBothVersionsOfTransformersWriteIt) {
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 512}};
  Json parameters = scaling;
  parameters["rope_theta"] = 5e5;
  const auto old =
      ParseTransformersConfig(Config({{"rope_theta", 5e5}, {"rope_scaling", scaling}}), true);
  const auto now = ParseTransformersConfig(Config({{"rope_parameters", parameters}}), true);
  for (const auto& config : {old, now}) {
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->rope_base, 5e5);
    EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kLlama3);
    EXPECT_EQ(config->rope_scaling.factor, 8);
    EXPECT_EQ(config->rope_scaling.original_context, 512);
  }
}

TEST(TransformersConfigTest, ServesNoMorePositionsThanASlidingWindowHas) {
  const auto context = [](const Json& changes) {
    return ParseTransformersConfig(Config(changes), true)->context_length;
  };
  EXPECT_EQ(context({{"model_type", "mistral"}, {"sliding_window", 1024}}), 1024);
  EXPECT_EQ(context({{"model_type", "mistral"}, {"sliding_window", nullptr}}), 4096);
  EXPECT_EQ(context({{"model_type", "qwen2"}, {"sliding_window", 1024}}), 4096);
  EXPECT_EQ(
      context({{"model_type", "qwen2"}, {"sliding_window", 1024}, {"use_sliding_window", true}}),
      1024);
}

TEST(TransformersConfigTest, AScalingStretchesTheWholeContextNotTheSlidingWindow) {
  const auto original = [](Json changes) {
    changes.update({{"model_type", "mistral"},
                    {"sliding_window", 1024},
                    {"rope_scaling", {{"type", "yarn"}, {"factor", 2}}}});
    return ParseTransformersConfig(Config(changes), true)->rope_scaling.original_context;
  };
  EXPECT_EQ(original(Json::object()), 4096);
  EXPECT_EQ(original({{"original_max_position_embeddings", 2048}}), 2048);
}

TEST(TransformersConfigTest, NamesWhatItCannotComputeAndWhatItCan) {
  EXPECT_THAT(Message({{"model_type", "gemma"}}),
              AllOf(HasSubstr("'model_type' is 'gemma'"),
                    HasSubstr("want one of llama, mistral, qwen2, qwen3")));
  EXPECT_THAT(Message({{"hidden_act", "gelu"}}), HasSubstr("'hidden_act' is 'gelu', want silu"));
  EXPECT_THAT(Message({{"partial_rotary_factor", 0.5}}), HasSubstr("'partial_rotary_factor'"));
  EXPECT_THAT(Message({{"quantization_config", {{"bits", 4}}}}),
              HasSubstr("'quantization_config' is set, want weights in F32, F16 or BF16"));
  EXPECT_THAT(Message({{"rope_scaling", {{"rope_type", "longrope"}}}}),
              AllOf(HasSubstr("'rope_scaling.rope_type' is 'longrope'"),
                    HasSubstr("want one of none, linear, llama3, yarn")));
}

TEST(TransformersConfigTest, NamesValuesThatCannotBe) {
  EXPECT_THAT(Message({{"hidden_size", 0}}), HasSubstr("'hidden_size' is 0, want 1 to"));
  EXPECT_THAT(Message({{"hidden_size", "64"}}), HasSubstr("'hidden_size' is \"64\""));
  EXPECT_THAT(Message({{"vocab_size", nullptr}}), HasSubstr("'vocab_size' is missing"));
  EXPECT_THAT(Message({{"num_key_value_heads", 3}}),
              HasSubstr("'num_attention_heads' is 4, want a multiple of 'num_key_value_heads', 3"));
  EXPECT_THAT(Message({{"head_dim", 7}}), HasSubstr("an even number"));
  EXPECT_THAT(Message({{"rope_theta", -1}}), HasSubstr("'rope_theta' is -1"));
  EXPECT_THAT(Message({{"rope_theta", 1}, {"rope_scaling", {{"type", "yarn"}, {"factor", 2}}}}),
              HasSubstr("the base of RoPE is 1, want above 1 with yarn"));
  EXPECT_THAT(Message({{"rope_scaling", 4}}), HasSubstr("'rope_scaling' is no object"));
  EXPECT_THAT(Message({{"rope_scaling", {{"type", "linear"}, {"factor", 0.5}}}}),
              HasSubstr("the factor of 'rope_scaling' is 0.5"));
}

TEST(TransformersConfigTest, SurvivesValuesOfAnyKind) {
  const Json whole =
      Config({{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 32}}},
              {"sliding_window", 7},
              {"tie_word_embeddings", true}});
  const Json flat = whole.flatten();
  for (const auto& [pointer, old] : flat.items()) {
    for (const Json& value : {Json(), Json(3), Json(-1), Json(1e300), Json("x"), Json::array({1}),
                              Json(true), Json::object({{"type", 1}}), Json(UINT64_MAX)}) {
      Json json = whole;
      json[Json::json_pointer(pointer)] = value;
      const auto config = ParseTransformersConfig(json, true);
      EXPECT_EQ(config.ok(), config.status().message().empty()) << pointer;
    }
  }
}

}  // namespace
}  // namespace heavywater
