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
  EXPECT_THAT(message(GgufWriter().Field("tokenizer.ggml.model", "llama")),
              AllOf(HasSubstr("'tokenizer.ggml.model' is 'llama'"), HasSubstr("want 'gpt2'")));
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

}  // namespace
}  // namespace heavywater
