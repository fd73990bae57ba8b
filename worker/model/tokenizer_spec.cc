#include "worker/model/tokenizer_spec.h"

#include <array>
#include <charconv>

#include "cache_service/base/status.h"
#include "worker/model/gguf_file.h"
#include "worker/model/message.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

struct PreTokenizerName {
  std::string_view in_file;
  std::string_view name;
  bool whole_words_first = false;
};
// GGUF has several names for the same.
constexpr std::array<PreTokenizerName, 6> kPreTokenizers = {{{"smollm", "smollm"},
                                                             {"llama-bpe", "llama-bpe", true},
                                                             {"llama3", "llama-bpe", true},
                                                             {"llama-v3", "llama-bpe", true},
                                                             {"qwen2", "qwen2"},
                                                             {"deepseek-r1-qwen", "qwen2"}}};

class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file) {}

  absl::StatusOr<TokenizerSpec> Read() {
    HW_ASSIGN_OR_RETURN(spec_.model, file_.GetString("tokenizer.ggml.model"));
    if (spec_.model == "gpt2") {
      HW_RETURN_IF_ERROR(ReadPreTokenizer());
    } else if (spec_.model != "llama") {
      return absl::UnimplementedError(Message("field 'tokenizer.ggml.model' is ",
                                              Quoted(spec_.model), ", want one of gpt2, llama"));
    }
    HW_RETURN_IF_ERROR(ReadVocabulary());
    HW_RETURN_IF_ERROR(ReadSpecialTokens());
    HW_RETURN_IF_ERROR(ReadSpaces());
    if (file_.Has("tokenizer.chat_template")) {
      HW_ASSIGN_OR_RETURN(spec_.chat_template, file_.GetString("tokenizer.chat_template"));
      HW_RETURN_IF_ERROR(CheckText("field 'tokenizer.chat_template'", spec_.chat_template));
    }
    return std::move(spec_);
  }

 private:
  absl::Status ReadPreTokenizer() {
    HW_ASSIGN_OR_RETURN(const auto name, file_.GetString("tokenizer.ggml.pre"));
    return SetPreTokenizer("tokenizer.ggml.pre", std::string(name), spec_);
  }

  absl::Status ReadVocabulary() {
    HW_ASSIGN_OR_RETURN(const auto tokens, file_.GetStrings("tokenizer.ggml.tokens"));
    if (tokens.empty()) {
      return absl::InvalidArgumentError("field 'tokenizer.ggml.tokens' is empty");
    }
    spec_.tokens.assign(tokens.begin(), tokens.end());
    if (spec_.model == "llama") {
      HW_ASSIGN_OR_RETURN(spec_.scores, file_.GetFloats("tokenizer.ggml.scores"));
      HW_RETURN_IF_ERROR(CheckSize("tokenizer.ggml.scores", spec_.scores.size()));
    } else {
      HW_ASSIGN_OR_RETURN(const auto merges, file_.GetStrings("tokenizer.ggml.merges"));
      spec_.merges.assign(merges.begin(), merges.end());
    }
    HW_ASSIGN_OR_RETURN(const auto types, file_.GetInt32s("tokenizer.ggml.token_type"));
    for (const int32_t type : types) spec_.token_types.push_back(static_cast<TokenType>(type));
    return CheckSize("tokenizer.ggml.token_type", types.size());
  }

  absl::Status CheckSize(std::string_view field, size_t size) const {
    if (size == spec_.tokens.size()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Message("field '", field, "' has ", size, " elements, want ", spec_.tokens.size()));
  }

  absl::Status ReadSpecialTokens() {
    HW_ASSIGN_OR_RETURN(spec_.begin_of_text, TokenId("tokenizer.ggml.bos_token_id"));
    HW_ASSIGN_OR_RETURN(spec_.end_of_turn, TokenId("tokenizer.ggml.eos_token_id"));
    HW_ASSIGN_OR_RETURN(spec_.unknown, TokenId("tokenizer.ggml.unknown_token_id"));
    for (const std::string_view field :
         {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
      HW_ASSIGN_OR_RETURN(const int32_t id, TokenId(field));
      if (id != kNoToken && id != spec_.end_of_turn) spec_.other_ends.push_back(id);
    }
    // SentencePiece's and Llama 3's models begin with it unless the file says otherwise.
    const bool begins = spec_.model == "llama" || spec_.pre_tokenizer == "llama-bpe";
    HW_ASSIGN_OR_RETURN(spec_.adds_begin_of_text, Flag("tokenizer.ggml.add_bos_token", begins));
    HW_ASSIGN_OR_RETURN(spec_.adds_end_of_text, Flag("tokenizer.ggml.add_eos_token", false));
    return absl::OkStatus();
  }

  absl::Status ReadSpaces() {
    const bool sentence_piece = spec_.model == "llama";
    HW_ASSIGN_OR_RETURN(const bool adds, Flag("tokenizer.ggml.add_space_prefix", sentence_piece));
    if (adds && !sentence_piece) {
      return absl::UnimplementedError(
          "field 'tokenizer.ggml.add_space_prefix' is true, want false with model gpt2");
    }
    if (adds) spec_.space_prefix = SpacePrefix::kEverySegment;
    HW_ASSIGN_OR_RETURN(const bool removes, Flag("tokenizer.ggml.remove_extra_whitespaces", false));
    if (!removes) return absl::OkStatus();
    return absl::UnimplementedError(
        "field 'tokenizer.ggml.remove_extra_whitespaces' is true, want false");
  }

  absl::StatusOr<bool> Flag(std::string_view field, bool otherwise) const {
    if (!file_.Has(field)) return otherwise;
    return file_.GetBool(field);
  }

  absl::StatusOr<int32_t> TokenId(std::string_view field) const {
    if (!file_.Has(field)) return kNoToken;
    HW_ASSIGN_OR_RETURN(const int64_t id, file_.GetInteger(field));
    if (id < 0 || static_cast<size_t>(id) >= spec_.tokens.size()) {
      return absl::InvalidArgumentError(
          Message("field '", field, "' is ", id, ", want a token below ", spec_.tokens.size()));
    }
    return static_cast<int32_t>(id);
  }

  const GgufFile& file_;
  TokenizerSpec spec_;
};

}  // namespace

std::optional<uint8_t> ByteOf(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return {};
  const char* const digits = token.data() + 3;
  uint8_t byte = 0;  // unsigned: from_chars takes no sign
  const auto [end, error] = std::from_chars(digits, digits + 2, byte, 16);
  if (error != std::errc() || end != digits + 2) return {};
  return byte;
}

absl::Status SetPreTokenizer(const std::string& field, const std::string& name,
                             TokenizerSpec& spec) {
  for (const PreTokenizerName& known : kPreTokenizers) {
    if (known.in_file != name) continue;
    spec.pre_tokenizer = known.name;
    spec.whole_words_first = known.whole_words_first;
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      Message("field '", field, "' is ", Quoted(name), ", want one of smollm, llama-bpe, qwen2"));
}

absl::Status FillVocabulary(int vocab_size, TokenizerSpec& spec) {
  const size_t given = spec.tokens.size();
  if (given > static_cast<size_t>(vocab_size)) {
    return absl::InvalidArgumentError(
        Message("the tokenizer has ", given, " tokens, want at most the model's ", vocab_size));
  }
  for (size_t id = given; id < static_cast<size_t>(vocab_size); ++id) {
    spec.tokens.push_back(Message("[PAD", id, "]"));
    spec.token_types.push_back(TokenType::kUnused);
    if (!spec.scores.empty()) spec.scores.push_back(0);
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const GgufFile& file) {
  return Reader(file).Read();
}

}  // namespace heavywater
