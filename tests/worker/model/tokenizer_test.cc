#include "worker/model/tokenizer.h"

#include <ctime>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/real_model.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/pre_tokenizer.h"
#include "worker/model/streaming_decoder.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// All bytes but 0xff, then some merges, then two control tokens of which one
// begins like the other. Token i < 255 is byte i.
TokenizerSpec SmallSpec() {
  TokenizerSpec spec;
  spec.model = "gpt2";
  spec.pre_tokenizer = "smollm";
  for (int byte = 0; byte < 255; ++byte) {
    spec.tokens.emplace_back(ByteToAlphabet(static_cast<unsigned char>(byte)));
  }
  spec.tokens.insert(spec.tokens.end(), {"ab", "bc", "abc", "aa"});  // 255 .. 258
  spec.merges = {"b c", "a b", "a bc", "a a"};
  spec.token_types.assign(spec.tokens.size(), TokenType::kNormal);
  spec.tokens.insert(spec.tokens.end(), {"<end>", "<end>+"});  // 259, 260
  spec.token_types.resize(spec.tokens.size(), TokenType::kControl);
  spec.end_of_turn = 259;
  return spec;
}

Tokenizer SmallTokenizer() { return *Tokenizer::Create(SmallSpec()); }

std::vector<int32_t> Encode(const Tokenizer& tokenizer, std::string_view text,
                            ControlTokens control = ControlTokens::kAsText) {
  const auto tokens = tokenizer.Encode(text, control);
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  return tokens.ok() ? *tokens : std::vector<int32_t>();
}

TEST(PreTokenizerTest, CutsAsThePatternSays) {
  EXPECT_THAT(SplitWords("It's  10 x\n\n y!?", WordPattern::kSmolLm),
              ElementsAre("It", "'s", "  ", "1", "0", " x", "\n\n", " y", "!?"));
  EXPECT_THAT(SplitWords("a   b \n", WordPattern::kSmolLm), ElementsAre("a", "  ", " b", " \n"));
  EXPECT_THAT(SplitWords("\n\nx 'll'x", WordPattern::kSmolLm),
              ElementsAre("\n", "\n", "x", " '", "ll", "'", "x"));
  EXPECT_TRUE(SplitWords("", WordPattern::kSmolLm).empty());
}

TEST(PreTokenizerTest, KnowsLettersNumbersAndSpacesBeyondAscii) {
  EXPECT_THAT(SplitWords("é中²٣ x", WordPattern::kSmolLm), ElementsAre("é中", "²", "٣", " x"));
  EXPECT_THAT(SplitWords("\u00a0\u00a0x", WordPattern::kSmolLm),
              ElementsAre("\u00a0", "\u00a0", "x"));
}

TEST(TokenizerTest, MergesTheBestPairFirstAndTheLeftmostOfEquals) {
  const Tokenizer tokenizer = SmallTokenizer();
  EXPECT_THAT(Encode(tokenizer, "abc"), ElementsAre(257));  // "b c" before "a b"
  EXPECT_THAT(Encode(tokenizer, "abb"), ElementsAre(255, 'b'));
  EXPECT_THAT(Encode(tokenizer, "aaa"), ElementsAre(258, 'a'));
}

TEST(TokenizerTest, DropsBytesForWhichThereIsNoToken) {
  // U+00FF is c3 bf: both have tokens. No valid text has the byte ff, so a
  // vocabulary that lacks c3 shows it.
  TokenizerSpec spec = SmallSpec();
  spec.tokens[0xc3] = "unused";
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(Encode(*tokenizer, "x\u00ff"), ElementsAre('x', 0xbf));
}

TEST(TokenizerTest, TakesControlTokensOnlyWhenAskedAndTheLongestOne) {
  const Tokenizer tokenizer = SmallTokenizer();
  EXPECT_THAT(Encode(tokenizer, "a<end>+<end>b", ControlTokens::kAsToken),
              ElementsAre('a', 260, 259, 'b'));
  EXPECT_EQ(Encode(tokenizer, "<end>").size(), 5u);
  EXPECT_THAT(Encode(tokenizer, "<en", ControlTokens::kAsToken), ElementsAre('<', 'e', 'n'));
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8NamingTheByte) {
  for (const std::string_view text : {"ab\xff", "ab\xc3", "ab\xc0\x80", "ab\xed\xa0\x80"}) {
    const auto tokens = SmallTokenizer().Encode(text, ControlTokens::kAsText);
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(tokens.status().message(), HasSubstr("byte 2"));
  }
}

TEST(TokenizerTest, DecodesWithoutControlTokensAndReplacesBrokenCharacters) {
  const Tokenizer tokenizer = SmallTokenizer();
  EXPECT_EQ(*tokenizer.Decode(std::vector<int32_t>{257, 259, ' ', 0xc3, 0xa9}), "abc é");
  // A lead byte and its second, cut off by a letter, are one replacement.
  EXPECT_EQ(*tokenizer.Decode(std::vector<int32_t>{0xe4, 0xbd, 'x', 0x80, 0xf0}),
            "\ufffdx\ufffd\ufffd");
}

TEST(TokenizerTest, RefusesIdsOutsideTheVocabulary) {
  for (const int32_t token : {-1, 261}) {
    const auto text = SmallTokenizer().Decode(std::vector<int32_t>{token});
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(text.status().message(), HasSubstr("less than 261"));
  }
}

TEST(TokenizerTest, NamesMergesAndTokensThatDoNotFit) {
  TokenizerSpec spec = SmallSpec();
  spec.merges.push_back("ab zz");
  EXPECT_THAT(Tokenizer::Create(spec).status().message(), HasSubstr("merge 'ab zz' needs 'zz'"));
  spec = SmallSpec();
  spec.merges.push_back("ab");
  EXPECT_THAT(Tokenizer::Create(spec).status().message(), HasSubstr("'ab' is not two tokens"));
  spec = SmallSpec();
  spec.tokens[0] = "ab";
  EXPECT_THAT(Tokenizer::Create(spec).status().message(), HasSubstr("token 255, 'ab', occurs"));
  spec = SmallSpec();
  spec.tokens[0] = "a b";
  EXPECT_THAT(Tokenizer::Create(spec).status().message(), HasSubstr("token 0, 'a b', is not in"));
}

TEST(TokenizerTest, RefusesByteTokensThatNameNoByteLongTokensAndScoresThatCannotBe) {
  TokenizerSpec spec;
  spec.model = "llama";
  spec.tokens = {"<0x41>", "\u2581b\u2581\u2581"};
  spec.token_types = {TokenType::kByte, TokenType::kNormal};
  spec.scores = {-1, -2};
  const auto message = [](const TokenizerSpec& changed) {
    return std::string(Tokenizer::Create(changed).status().message());
  };
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*tokenizer->TokenBytes(0), "A");
  EXPECT_EQ(*tokenizer->TokenBytes(1), " b  ");
  TokenizerSpec changed = spec;
  changed.tokens[0] = "<0x-1>";
  EXPECT_THAT(message(changed), HasSubstr("token 0 of type byte is '<0x-1>'"));
  changed = spec;
  changed.tokens[1].assign((64 << 10) + 1, 'b');
  EXPECT_THAT(message(changed), HasSubstr("token 1 has 65537 bytes"));
  changed = spec;
  changed.scores[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(message(changed), HasSubstr("the score of token 1 is"));
  changed.scores = {1};
  EXPECT_THAT(message(changed), HasSubstr("1 scores, want 2"));
}

TEST(StreamingDecoderTest, HoldsACharacterBackUntilItIsWhole) {
  const Tokenizer tokenizer = SmallTokenizer();
  StreamingDecoder decoder(tokenizer);
  EXPECT_EQ(*decoder.Add(0xf0), "");
  EXPECT_EQ(*decoder.Add(0x9f), "");
  EXPECT_EQ(*decoder.Add(0x98), "");
  EXPECT_EQ(*decoder.Add(0x80), "\U0001f600");
  EXPECT_EQ(*decoder.Add(0xe4), "");
  EXPECT_FALSE(decoder.Add(999).ok());
  EXPECT_EQ(*decoder.Add('x'), "\ufffdx");
  EXPECT_EQ(*decoder.Add(0xe4), "");
  EXPECT_EQ(decoder.Finish(), "\ufffd");
  EXPECT_EQ(decoder.Finish(), "");
}

class RealTokenizerTest : public RealModelTest {
 protected:
  void SetUp() override {
    RealModelTest::SetUp();
    if (file_ == nullptr) return;
    auto spec = ReadTokenizerSpec(*file_);
    ASSERT_TRUE(spec.ok()) << spec.status();
    auto tokenizer = Tokenizer::Create(*std::move(spec));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = std::make_unique<Tokenizer>(*std::move(tokenizer));
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(RealTokenizerTest, GivesTheIdsOfTheTokenizersLibrary) {
  std::ifstream stream(HEAVYWATER_SOURCE_DIR "/tests/worker/model/testdata/tokenizer_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(stream);
  ASSERT_GT(cases.size(), 200u);
  for (const auto& entry : cases) {
    const std::string text = entry.at("text");
    const std::vector<int32_t> want = entry.at("ids");
    EXPECT_EQ(Encode(*tokenizer_, text, ControlTokens::kAsToken), want)
        << testing::PrintToString(text);
  }
}

TEST_F(RealTokenizerTest, TextComesBackFromItsTokens) {
  const std::string text = "It's 10 °C in Zürich, 你好 \U0001f600\n\n  def f(x):";
  const std::vector<int32_t> tokens = Encode(*tokenizer_, text);
  EXPECT_EQ(*tokenizer_->Decode(tokens), text);
}

TEST_F(RealTokenizerTest, HasTheModelsSpecialTokensAndChatTemplate) {
  const TokenizerSpec& spec = tokenizer_->spec();
  EXPECT_EQ(spec.tokens.size(), 49152u);
  EXPECT_EQ(spec.merges.size(), 48900u);
  EXPECT_EQ(spec.begin_of_text, 1);
  EXPECT_EQ(spec.end_of_turn, 2);
  EXPECT_EQ(spec.unknown, 0);
  EXPECT_FALSE(spec.adds_begin_of_text);
  EXPECT_TRUE(tokenizer_->IsEndOfTurn(2));
  EXPECT_FALSE(tokenizer_->IsEndOfTurn(1));
  EXPECT_THAT(spec.chat_template, HasSubstr("<|im_start|>"));
}

TEST_F(RealTokenizerTest, EncodesANovelInLessThanTwoSecondsOfCpuTime) {
  // Different words throughout, so that remembering words does not help.
  std::string text;
  for (uint32_t i = 0; text.size() < 433410; ++i) {
    for (uint32_t bits = i * 2654435761u; bits != 0; bits /= 26) {
      text.push_back(static_cast<char>('a' + bits % 26));
    }
    text.push_back(' ');
  }
  const std::clock_t start = std::clock();
  EXPECT_GT(Encode(*tokenizer_, text).size(), 100000u);
  EXPECT_LT(std::clock() - start, 2 * CLOCKS_PER_SEC);
}

TEST_F(RealTokenizerTest, TimeDoesNotGrowWithTheSquareOfAWord) {
  const std::string word(1 << 20, 'a');
  const std::clock_t start = std::clock();
  EXPECT_GT(Encode(*tokenizer_, word).size(), 1000u);
  EXPECT_LT(std::clock() - start, 10 * CLOCKS_PER_SEC);
}

}  // namespace
}  // namespace heavywater
