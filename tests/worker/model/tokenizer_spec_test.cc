#include "worker/model/tokenizer_spec.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TokenizerSpecTest, RefusesOtherTokenizersNamingTheField) {
  const auto message = [](const GgufWriter& writer) {
    return std::string(ReadTokenizerSpec(**OpenGguf(writer.Finish())).status().message());
  };
  EXPECT_THAT(
      message(GgufWriter().Field("tokenizer.ggml.model", "t5")),
      AllOf(HasSubstr("'tokenizer.ggml.model' is 't5'"), HasSubstr("want one of gpt2, llama")));
  EXPECT_THAT(
      message(
          GgufWriter().Field("tokenizer.ggml.model", "gpt2").Field("tokenizer.ggml.pre", "falcon")),
      AllOf(HasSubstr("'tokenizer.ggml.pre' is 'falcon'"),
            HasSubstr("want one of smollm, llama-bpe, qwen2")));
  const auto writer = [](std::vector<int32_t> types) {
    return GgufWriter()
        .Field("tokenizer.ggml.model", "gpt2")
        .Field("tokenizer.ggml.pre", "smollm")
        .Field("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"})
        .Field("tokenizer.ggml.merges", std::vector<std::string>{})
        .Field("tokenizer.ggml.token_type", types);
  };
  EXPECT_TRUE(ReadTokenizerSpec(**OpenGguf(writer({1, 1}).Finish())).ok());
  EXPECT_THAT(message(writer({1})), HasSubstr("has 1 elements, want 2"));
  EXPECT_THAT(message(writer({1, 1}).Field("tokenizer.ggml.eos_token_id", uint32_t{2})),
              HasSubstr("'tokenizer.ggml.eos_token_id' is 2"));
  EXPECT_THAT(message(writer({1, 1}).Field("tokenizer.ggml.add_space_prefix", true)),
              HasSubstr("'tokenizer.ggml.add_space_prefix'"));
}

TEST(TokenizerSpecTest, ReadsSentencePieceWithItsUsualSettings) {
  const GgufWriter writer = GgufWriter()
                                .Field("tokenizer.ggml.model", "llama")
                                .Field("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"})
                                .Field("tokenizer.ggml.scores", std::vector<float>{-1, -2})
                                .Field("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1})
                                .Field("tokenizer.ggml.eot_token_id", uint32_t{1});
  const auto spec = ReadTokenizerSpec(**OpenGguf(writer.Finish()));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->scores, (std::vector<float>{-1, -2}));
  EXPECT_EQ(spec->space_prefix, SpacePrefix::kEverySegment);
  EXPECT_TRUE(spec->adds_begin_of_text);
  EXPECT_EQ(spec->other_ends, std::vector<int32_t>{1});
}

TEST(TokenizerSpecTest, AByteTokenIsTwoHexadecimalDigitsInItsBracketsAndNothingElse) {
  EXPECT_EQ(ByteOf("<0x0A>"), 0x0a);
  EXPECT_EQ(ByteOf("<0xfF>"), 0xff);
  for (const char* token : {"<0x-1>", "<0x+1>", "<0x 1>", "<0x1>", "<0x0G>", "<0x0x>", "<0x0A)",
                            "<0x0A>>", "(0x0A>", "", "<0x>"}) {
    EXPECT_FALSE(ByteOf(token).has_value()) << token;
  }
}

TEST(TokenizerSpecTest, FillsTheVocabularyUpToTheModelsRows) {
  TokenizerSpec spec;
  spec.tokens = {"a"};
  spec.token_types = {TokenType::kNormal};
  ASSERT_TRUE(FillVocabulary(3, spec).ok());
  EXPECT_EQ(spec.tokens.size(), 3u);
  EXPECT_EQ(spec.token_types.back(), TokenType::kUnused);
  EXPECT_NE(spec.tokens[1], spec.tokens[2]);
  EXPECT_THAT(std::string(FillVocabulary(2, spec).message()),
              HasSubstr("has 3 tokens, want at most the model's 2"));
}

}  // namespace
}  // namespace heavywater
