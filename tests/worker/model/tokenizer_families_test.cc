// Tokenizers of each family against the libraries that define them, as recorded in
// testdata/tokenizer_families.json (make_tokenizer_families.py says how).
#include <fstream>
#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_checkpoint.h"
#include "worker/model/pre_tokenizer.h"
#include "worker/model/tokenizer.h"
#include "worker/model/tokenizer_folder.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

const Json& Families() {
  static const auto* const families = [] {
    std::ifstream stream(HEAVYWATER_SOURCE_DIR
                         "/tests/worker/model/testdata/tokenizer_families.json");
    return new Json(Json::parse(stream));
  }();
  return *families;
}

void ExpectIds(TokenizerSpec spec, const Json& cases, ControlTokens control) {
  const auto tokenizer = Tokenizer::Create(std::move(spec));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ASSERT_GT(cases.size(), 90u);
  for (const Json& entry : cases) {
    const std::string text = entry["text"];
    const auto ids = tokenizer->Encode(text, control);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, entry["ids"].get<std::vector<int32_t>>()) << Json(text).dump();
  }
}

class TokenizerFamilyTest : public testing::TestWithParam<const char*> {
 protected:
  const Json& family() const { return Families()[GetParam()]; }
};

TEST_P(TokenizerFamilyTest, ATokenizerJsonGivesTheIdsOfTheTokenizersLibrary) {
  auto spec = ParseTokenizerJson(family()["tokenizer"]);
  ASSERT_TRUE(spec.ok()) << spec.status();
  ExpectIds(*std::move(spec), family()["cases"], ControlTokens::kAsToken);
}

TEST_P(TokenizerFamilyTest, APromptBeginsAsItsPostProcessorSays) {
  auto spec = ParseTokenizerJson(family()["tokenizer"]);
  ASSERT_TRUE(spec.ok()) << spec.status();
  const auto tokenizer = Tokenizer::Create(*std::move(spec));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto ids = tokenizer->EncodePrompt("A prompt.");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(*ids, family()["prompt"].get<std::vector<int32_t>>());
  const TokenizerSpec& read = tokenizer->spec();
  if (!read.adds_begin_of_text) return;
  const std::string begin = read.tokens[static_cast<size_t>(read.begin_of_text)];
  EXPECT_EQ(tokenizer->EncodePrompt(begin + "x")->size(), tokenizer->EncodePrompt("x")->size())
      << "a template that writes it does not get it twice";
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerFamilyTest,
                         testing::Values("llama-bpe", "qwen2", "llama2", "mistral"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST(GgufTokenizerTest, ReadsTheSameByteLevelTokenizersFromGguf) {
  for (const std::string name : {"llama-bpe", "qwen2"}) {
    SCOPED_TRACE(name);
    const auto from_json = ParseTokenizerJson(Families()[name]["tokenizer"]);
    ASSERT_TRUE(from_json.ok()) << from_json.status();
    std::vector<int32_t> types;
    for (const TokenType type : from_json->token_types) types.push_back(static_cast<int>(type));
    const GgufWriter writer = GgufWriter()
                                  .Field("tokenizer.ggml.model", "gpt2")
                                  .Field("tokenizer.ggml.pre", name)
                                  .Field("tokenizer.ggml.tokens", from_json->tokens)
                                  .Field("tokenizer.ggml.merges", from_json->merges)
                                  .Field("tokenizer.ggml.token_type", types);
    auto spec = ReadTokenizerSpec(**OpenGguf(writer.Finish()));
    ASSERT_TRUE(spec.ok()) << spec.status();
    ExpectIds(*std::move(spec), Families()[name]["cases"], ControlTokens::kAsToken);
  }
}

TokenizerSpec SentencePieceSpec() {
  const Json& family = Families()["sentencepiece"];
  const GgufWriter writer =
      GgufWriter()
          .Field("tokenizer.ggml.model", "llama")
          .Field("tokenizer.ggml.tokens", family["pieces"].get<std::vector<std::string>>())
          .Field("tokenizer.ggml.scores", family["scores"].get<std::vector<float>>())
          .Field("tokenizer.ggml.token_type", family["types"].get<std::vector<int32_t>>())
          .Field("tokenizer.ggml.bos_token_id", uint32_t{1});
  return *ReadTokenizerSpec(**OpenGguf(writer.Finish()));
}

TEST(GgufTokenizerTest, SentencePieceGivesTheIdsOfItsLibrary) {
  ExpectIds(SentencePieceSpec(), Families()["sentencepiece"]["cases"], ControlTokens::kAsText);
}

TEST(GgufTokenizerTest, SentencePieceTextComesBackWithTheSpaceBeforeIt) {
  const auto tokenizer = Tokenizer::Create(SentencePieceSpec());
  for (const std::string text : {"plain text", "  spaces  ", "line\nline", "\u4f60 \U0001f600"}) {
    const auto ids = tokenizer->EncodePrompt(text);
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(ids->front(), 1);
    EXPECT_EQ(*tokenizer->Decode(*ids), " " + text);
  }
}

TEST(GgufTokenizerTest, ASuffixContinuesTheTextWithoutASpaceAndHasThePromptsEnd) {
  TokenizerSpec spec = SentencePieceSpec();
  spec.adds_end_of_text = true;
  spec.end_of_turn = 2;
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto prompt = tokenizer->EncodePrompt("plain", /*has_suffix=*/true);
  const auto suffix = tokenizer->EncodeSuffix("ly put");
  ASSERT_TRUE(prompt.ok() && suffix.ok());
  EXPECT_EQ(*tokenizer->Decode(*prompt) + *tokenizer->Decode(*suffix), " plainly put");
  EXPECT_NE(prompt->back(), 2);
  EXPECT_EQ(suffix->back(), 2);
  EXPECT_EQ(tokenizer->EncodePrompt("plain")->back(), 2);
}

TEST(WordPatternTest, CutsAsThePatternsOfLlama3AndQwen2Say) {
  EXPECT_THAT(SplitWords("It'S  12345 x\n\n y!?\r\n", WordPattern::kLlama3),
              ElementsAre("It", "'S", " ", " ", "123", "45", " x", "\n\n", " y", "!?\r\n"));
  EXPECT_THAT(SplitWords("a12 \n b", WordPattern::kQwen2), ElementsAre("a", "1", "2", " \n", " b"));
}

TEST(TokenizerFolderTest, TakesEndsAndTheChatTemplateFromTheFilesBeside) {
  const TemporaryFolder folder;
  folder.Write("tokenizer.json", Families()["llama-bpe"]["tokenizer"].dump());
  folder.Write("generation_config.json", R"({"eos_token_id": [300, 301]})");
  folder.Write("config.json", R"({"eos_token_id": 302})");
  folder.Write("tokenizer_config.json", R"({"eos_token": {"content": "<|eot_id|>"},
      "chat_template": [{"name": "tool_use", "template": "no"},
                        {"name": "default", "template": "yes"}]})");
  const auto spec = ReadTokenizerFolder(folder.path());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tokens[static_cast<size_t>(spec->end_of_turn)], "<|eot_id|>");
  EXPECT_EQ(spec->other_ends, (std::vector<int32_t>{300, 301, 302}));
  EXPECT_EQ(spec->chat_template, "yes");
  folder.Write("chat_template.jinja", "{{ messages }}");
  EXPECT_EQ(ReadTokenizerFolder(folder.path())->chat_template, "{{ messages }}");
  const auto tokenizer = Tokenizer::Create(*spec);
  for (const int32_t end : {300, 301, 302}) EXPECT_TRUE(tokenizer->IsEndOfTurn(end));
}

TEST(TokenizerFolderTest, NamesWhatItCannotDo) {
  const auto message = [](const char* family, const char* pointer, const Json& value) {
    Json json = Families()[family]["tokenizer"];
    json[Json::json_pointer(pointer)] = value;
    return std::string(ParseTokenizerJson(json).status().message());
  };
  EXPECT_THAT(message("qwen2", "/model/type", "Unigram"),
              AllOf(HasSubstr("'model.type' is \"Unigram\""), HasSubstr("want BPE")));
  EXPECT_THAT(message("qwen2", "/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"),
              AllOf(HasSubstr("'pre_tokenizer' is"), HasSubstr("pattern of Llama 3 or Qwen 2")));
  EXPECT_THAT(message("qwen2", "/normalizer", {{"type", "NFKC"}}), HasSubstr("'normalizer' is"));
  EXPECT_THAT(message("llama2", "/normalizer", {{"type", "Lowercase"}}), HasSubstr("Metaspace"));
  EXPECT_THAT(message("llama-bpe", "/added_tokens/0/lstrip", true),
              HasSubstr("'added_tokens.lstrip'"));
  EXPECT_THAT(message("llama2", "/post_processor", {{"type", "BertProcessing"}}),
              HasSubstr("'post_processor' is"));
  EXPECT_THAT(message("llama2", "/post_processor", 3), HasSubstr("'post_processor' is 3"));
  EXPECT_THAT(message("llama2", "/model/vocab", Json::object()), HasSubstr("'model.vocab'"));
  EXPECT_THAT(message("llama2", "/model/vocab/x", -1), HasSubstr("the id of token 'x'"));
  EXPECT_THAT(message("llama2", "/model/unk_token", "nowhere"), HasSubstr("'nowhere'"));
  EXPECT_THAT(message("llama2", "/added_tokens/1/normalized", true),
              HasSubstr("'added_tokens.normalized'"));
  EXPECT_THAT(message("qwen2", "/model/dropout", 0.1), HasSubstr("'model.dropout' is 0.1"));
}

TEST(TokenizerFolderTest, TakesAnUnknownTokenOnlyWhereItIsComputedAsTheLibraryDoes) {
  const auto parse = [](const char* family, const Json& changes, const char* missing) {
    Json json = Families()[family]["tokenizer"];
    json["model"].update(changes);
    const Json id = json["model"]["vocab"][missing];
    json["model"]["vocab"].erase(missing);
    json["model"]["vocab"]["<gone>"] = id;
    return ParseTokenizerJson(json).status();
  };
  const Json unknown = {{"unk_token", "<gone>"}};
  EXPECT_THAT(std::string(parse("llama-bpe", unknown, "A").message()),
              HasSubstr("'model.unk_token' is \"<gone>\""));
  EXPECT_TRUE(parse("llama-bpe", Json::object(), "A").ok()) << "without one they are dropped";
  EXPECT_TRUE(parse("llama2", Json::object(), "<0x41>").ok()) << "several as one";
  EXPECT_THAT(std::string(parse("llama2", {{"fuse_unk", false}}, "<0x41>").message()),
              HasSubstr("'model.fuse_unk' is false"));
  EXPECT_TRUE(parse("llama2", {{"fuse_unk", false}}, "<0xFF>").ok()) << "in no text";
}

// Every value (of the vocabulary a few) replaced by one of another kind: a spec or an error
// with a message, never an exception.
TEST(TokenizerFolderTest, SurvivesValuesOfAnyKind) {
  for (const std::string name : {"llama-bpe", "mistral", "llama2"}) {
    const Json& whole = Families()[name]["tokenizer"];
    int of_vocabulary = 0;
    std::vector<std::string> pointers;
    const Json flat = whole.flatten();
    for (const auto& [pointer, value] : flat.items()) {
      const bool many =
          pointer.starts_with("/model/vocab/") || pointer.starts_with("/model/merges/");
      if (many && ++of_vocabulary % 200 != 0) continue;
      // The value itself and all that holds it.
      for (std::string at = pointer; !at.empty(); at.resize(at.rfind('/'))) pointers.push_back(at);
    }
    for (const std::string& pointer : pointers) {
      for (const Json& value : {Json(), Json(3), Json(-1), Json("x"), Json::array({1}), Json(true),
                                Json::object({{"type", 1}})}) {
        Json json = whole;
        json[Json::json_pointer(pointer)] = value;
        const auto spec = ParseTokenizerJson(json);
        if (!spec.ok()) {
          EXPECT_FALSE(spec.status().message().empty());
          continue;
        }
        (void)Tokenizer::Create(*spec);
      }
    }
  }
}

}  // namespace
}  // namespace heavywater
