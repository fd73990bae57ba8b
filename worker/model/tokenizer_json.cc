// ParseTokenizerJson().
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "cache_service/base/status.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/json_fields.h"
#include "worker/model/message.h"
#include "worker/model/tokenizer_folder.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTokens = 1 << 24;
constexpr size_t kShownBytes = 400;
constexpr std::string_view kSpace = "\u2581";

// As the tokenizers of the models are published.
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

absl::Status Unsupported(std::string_view part, const Json& got, std::string_view want) {
  std::string text = got.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return absl::UnimplementedError(Message("'", part, "' is ", text, ", want ", want));
}

// An object's `type`, or nothing.
std::string TypeOf(const Json& object) {
  const Json* type = JsonFields(object).Find("type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : "";
}

bool Is(const Json& object, std::string_view field, const Json& value) {
  const Json* found = JsonFields(object).Find(field);
  return found != nullptr && *found == value;
}

// The parts of a Sequence, or the one part itself.
std::vector<Json> PartsOf(const Json* object, const char* list) {
  if (object == nullptr) return {};
  if (TypeOf(*object) != "Sequence") return {*object};
  const Json* parts = JsonFields(*object).Find(list);
  if (parts == nullptr || !parts->is_array()) return {*object};
  return parts->get<std::vector<Json>>();
}

class Parser {
 public:
  explicit Parser(const Json& json) : fields_(json) {}

  absl::StatusOr<TokenizerSpec> Parse() {
    const Json* model = fields_.Find("model");
    if (model == nullptr || !model->is_object()) {
      return absl::InvalidArgumentError("field 'model' is missing, want an object");
    }
    HW_RETURN_IF_ERROR(ReadModel(*model));
    HW_RETURN_IF_ERROR(ReadAddedTokens());
    HW_RETURN_IF_ERROR(spec_.model == "llama" ? ReadCharacterLevel() : ReadByteLevel());
    HW_RETURN_IF_ERROR(ReadPostProcessor());
    return std::move(spec_);
  }

 private:
  absl::Status ReadModel(const Json& model) {
    const JsonFields fields(model, "model.");
    if (TypeOf(model) != "BPE")
      return Unsupported("model.type", model.value("type", Json()), "BPE");
    for (const std::string_view field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      HW_ASSIGN_OR_RETURN(const std::string affix, fields.TextOr(field, ""));
      if (!affix.empty()) return Unsupported(fields.Name(field), affix, "none");
    }
    const Json* dropout = fields.Find("dropout");
    if (dropout != nullptr && *dropout != 0) return Unsupported("model.dropout", *dropout, "none");
    HW_ASSIGN_OR_RETURN(const bool falls_back, fields.BoolOr("byte_fallback", false));
    spec_.model = falls_back ? "llama" : "gpt2";
    HW_ASSIGN_OR_RETURN(spec_.whole_words_first, fields.BoolOr("ignore_merges", false));
    if (falls_back && spec_.whole_words_first) {
      return Unsupported("model.ignore_merges", true, "false with byte_fallback");
    }
    HW_RETURN_IF_ERROR(ReadVocabulary(fields));
    HW_RETURN_IF_ERROR(ReadMerges(fields));
    HW_ASSIGN_OR_RETURN(const std::string unknown, fields.TextOr("unk_token", ""));
    if (unknown.empty()) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(spec_.unknown, Find(unknown));
    spec_.token_types[static_cast<size_t>(spec_.unknown)] = TokenType::kUnknown;
    return CheckUnknown(fields);
  }

  // Where every byte is a token nothing is unknown; else it must be what is computed: of
  // characters, several in a row as one.
  absl::Status CheckUnknown(const JsonFields& fields) const {
    if (HasAllBytes()) return absl::OkStatus();
    if (spec_.model != "llama") {
      return Unsupported("model.unk_token", *fields.Find("unk_token"),
                         "none, or a vocabulary with every byte");
    }
    HW_ASSIGN_OR_RETURN(const bool fuses, fields.BoolOr("fuse_unk", false));
    if (fuses) return absl::OkStatus();
    return Unsupported("model.fuse_unk", false, "true, or a vocabulary with every byte");
  }

  // All that UTF-8 has: c0, c1 and f5 to ff are in no text.
  bool HasAllBytes() const {
    std::array<bool, 256> has = {};
    for (size_t i = 0; i < spec_.tokens.size(); ++i) {
      if (spec_.model == "llama") {
        if (const auto byte = ByteOf(spec_.tokens[i])) has[*byte] = true;
      } else if (spec_.token_types[i] == TokenType::kNormal && spec_.tokens[i].size() <= 2) {
        const auto bytes = AlphabetToBytes(spec_.tokens[i]);
        if (bytes.has_value() && bytes->size() == 1) has[static_cast<uint8_t>((*bytes)[0])] = true;
      }
    }
    has[0xc0] = has[0xc1] = true;
    std::fill(has.begin() + 0xf5, has.end(), true);
    return std::ranges::count(has, false) == 0;
  }

  absl::Status ReadVocabulary(const JsonFields& fields) {
    const Json* vocab = fields.Find("vocab");
    if (vocab == nullptr || !vocab->is_object() || vocab->empty()) {
      return absl::InvalidArgumentError("field 'model.vocab' is missing, want tokens and ids");
    }
    for (const auto& [token, id] : vocab->items()) {
      HW_RETURN_IF_ERROR(Add(token, id, TokenType::kNormal));
    }
    if (spec_.model != "llama") return absl::OkStatus();
    for (size_t i = 0; i < spec_.tokens.size(); ++i) {
      if (ByteOf(spec_.tokens[i]).has_value()) spec_.token_types[i] = TokenType::kByte;
    }
    return absl::OkStatus();
  }

  absl::Status Add(const std::string& token, const Json& id, TokenType type) {
    const uint64_t index = id.is_number_unsigned() ? id.get<uint64_t>() : kMaxTokens;
    if (index >= kMaxTokens) {
      return absl::InvalidArgumentError(
          Message("the id of token ", Quoted(token), " is no number below ", kMaxTokens));
    }
    while (spec_.tokens.size() <= index) {  // ids that nobody names stay unused
      spec_.tokens.push_back(Message("[PAD", spec_.tokens.size(), "]"));
      spec_.token_types.push_back(TokenType::kUnused);
    }
    if (spec_.token_types[index] != TokenType::kUnused && spec_.tokens[index] != token) {
      return absl::InvalidArgumentError(Message("tokens ", Quoted(spec_.tokens[index]), " and ",
                                                Quoted(token), " both have the id ", index));
    }
    spec_.tokens[index] = token;
    spec_.token_types[index] = type;
    return absl::OkStatus();
  }

  absl::StatusOr<int32_t> Find(const std::string& token) const {
    const auto found = std::ranges::find(spec_.tokens, token);
    if (found != spec_.tokens.end()) return static_cast<int32_t>(found - spec_.tokens.begin());
    return absl::InvalidArgumentError(
        Message("token ", Quoted(token), " is not in the vocabulary"));
  }

  // Each is "left right" or, newer, ["left", "right"].
  absl::Status ReadMerges(const JsonFields& fields) {
    const Json* merges = fields.Find("merges");
    if (merges == nullptr || !merges->is_array()) {
      return absl::InvalidArgumentError("field 'model.merges' is missing, want a list");
    }
    for (const Json& merge : *merges) {
      if (merge.is_string()) {
        spec_.merges.push_back(merge.get<std::string>());
        continue;
      }
      const bool pair =
          merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      if (!pair)
        return absl::InvalidArgumentError("a merge in 'model.merges' is no pair of tokens");
      const std::string left = merge[0].get<std::string>();
      const std::string right = merge[1].get<std::string>();
      if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos) {
        return Unsupported("model.merges", merge, "tokens without spaces");
      }
      spec_.merges.push_back(Message(left, " ", right));
    }
    return absl::OkStatus();
  }

  absl::Status ReadAddedTokens() {
    const Json* added = fields_.Find("added_tokens");
    if (added == nullptr) return absl::OkStatus();
    if (!added->is_array()) return absl::InvalidArgumentError("field 'added_tokens' is no list");
    for (const Json& token : *added) {
      const JsonFields fields(token, "added_tokens.");
      HW_ASSIGN_OR_RETURN(const std::string content, fields.Text("content"));
      const Json* id = fields.Find("id");
      if (content.empty() || id == nullptr) {
        return absl::InvalidArgumentError("an entry of 'added_tokens' has no content or no id");
      }
      for (const std::string_view field : {"lstrip", "rstrip", "single_word"}) {
        HW_ASSIGN_OR_RETURN(const bool set, fields.BoolOr(field, false));
        if (set) return Unsupported(fields.Name(field), token, "false");
      }
      // The library looks for such a token in the normalised text.
      HW_ASSIGN_OR_RETURN(const bool normalised, fields.BoolOr("normalized", false));
      if (normalised && fields_.Has("normalizer")) {
        return Unsupported("added_tokens.normalized", token, "false with a normalizer");
      }
      HW_ASSIGN_OR_RETURN(const bool special, fields.BoolOr("special", false));
      HW_RETURN_IF_ERROR(
          Add(content, *id, special ? TokenType::kControl : TokenType::kUserDefined));
    }
    return absl::OkStatus();
  }

  absl::Status ReadByteLevel() {
    constexpr std::string_view kWant =
        "Digits or a Split by the pattern of Llama 3 or Qwen 2, then ByteLevel";
    const Json* all = fields_.Find("pre_tokenizer");
    const std::vector<Json> parts = PartsOf(all, "pretokenizers");
    if (parts.size() != 2 || TypeOf(parts[1]) != "ByteLevel" ||
        !Is(parts[1], "add_prefix_space", false)) {
      return Unsupported("pre_tokenizer", all == nullptr ? Json() : *all, kWant);
    }
    if (TypeOf(parts[0]) == "Digits" && Is(parts[0], "individual_digits", true) &&
        !Is(parts[1], "use_regex", false)) {
      spec_.pre_tokenizer = "smollm";
    } else if (TypeOf(parts[0]) == "Split" && Is(parts[0], "behavior", "Isolated") &&
               !Is(parts[0], "invert", true) && Is(parts[1], "use_regex", false)) {
      const Json pattern = parts[0].value("pattern", Json::object());
      if (Is(pattern, "Regex", kLlama3Pattern)) spec_.pre_tokenizer = "llama-bpe";
      if (Is(pattern, "Regex", kQwen2Pattern)) spec_.pre_tokenizer = "qwen2";
    }
    if (spec_.pre_tokenizer.empty()) return Unsupported("pre_tokenizer", *all, kWant);
    return CheckByteLevelNormalizer();
  }

  // Qwen 2's is NFC; the others have none.
  absl::Status CheckByteLevelNormalizer() const {
    const Json* normalizer = fields_.Find("normalizer");
    const bool composes = normalizer != nullptr && TypeOf(*normalizer) == "NFC";
    if (composes == (spec_.pre_tokenizer == "qwen2") && composes == (normalizer != nullptr)) {
      return absl::OkStatus();
    }
    return Unsupported("normalizer", normalizer == nullptr ? Json() : *normalizer,
                       "NFC with the pattern of Qwen 2, else none");
  }

  // Spaces as U+2581, by normalizers or by a Metaspace that does not split.
  absl::Status ReadCharacterLevel() {
    constexpr std::string_view kWant = "Prepend and Replace of U+2581, or Metaspace without split";
    const Json* normalizer = fields_.Find("normalizer");
    const Json* splitter = fields_.Find("pre_tokenizer");
    const auto unsupported = [&] {
      return Unsupported("normalizer and pre_tokenizer",
                         Json::array({normalizer == nullptr ? Json() : *normalizer,
                                      splitter == nullptr ? Json() : *splitter}),
                         kWant);
    };
    if (splitter != nullptr) {
      if (normalizer != nullptr && !PartsOf(normalizer, "normalizers").empty()) {
        return unsupported();
      }
      return ReadMetaspace(*splitter) ? absl::OkStatus() : unsupported();
    }
    bool replaces = false;
    for (const Json& part : PartsOf(normalizer, "normalizers")) {
      if (TypeOf(part) == "Prepend" && Is(part, "prepend", kSpace) && !replaces) {
        spec_.space_prefix = SpacePrefix::kEverySegment;
      } else if (TypeOf(part) == "Replace" && Is(part, "content", kSpace) &&
                 Is(part.value("pattern", Json::object()), "String", " ")) {
        replaces = true;
      } else {
        return unsupported();
      }
    }
    return replaces ? absl::OkStatus() : unsupported();
  }

  bool ReadMetaspace(const Json& splitter) {
    if (TypeOf(splitter) != "Metaspace" || !Is(splitter, "replacement", kSpace) ||
        !Is(splitter, "split", false)) {
      return false;
    }
    const std::string scheme = splitter.value("prepend_scheme", Json("always")).dump();
    if (scheme == "\"always\"") spec_.space_prefix = SpacePrefix::kEverySegmentButSpaces;
    if (scheme == "\"first\"") spec_.space_prefix = SpacePrefix::kStartButSpaces;
    return scheme == "\"always\"" || scheme == "\"first\"" || scheme == "\"never\"";
  }

  // What it puts around one text.
  absl::Status ReadPostProcessor() {
    for (const Json& part : PartsOf(fields_.Find("post_processor"), "processors")) {
      if (TypeOf(part) == "ByteLevel") continue;  // offsets only
      const Json* single = JsonFields(part).Find("single");
      if (TypeOf(part) != "TemplateProcessing" || single == nullptr || !single->is_array()) {
        return Unsupported("post_processor", part, "TemplateProcessing, ByteLevel or none");
      }
      HW_RETURN_IF_ERROR(ReadTemplate(*single));
    }
    return absl::OkStatus();
  }

  absl::Status ReadTemplate(const Json& single) {
    bool text_seen = false;
    for (const Json& item : single) {
      if (item.is_object() && item.contains("Sequence")) {
        text_seen = true;
        continue;
      }
      const Json special =
          item.is_object() ? item.value("SpecialToken", Json::object()) : Json::object();
      HW_ASSIGN_OR_RETURN(const std::string token,
                          JsonFields(special, "post_processor.single.").Text("id"));
      HW_ASSIGN_OR_RETURN(const int32_t id, Find(token));
      const bool again = text_seen ? spec_.adds_end_of_text : spec_.adds_begin_of_text;
      if (again) return Unsupported("post_processor", single, "one token before and one behind");
      (text_seen ? spec_.adds_end_of_text : spec_.adds_begin_of_text) = true;
      (text_seen ? spec_.end_of_turn : spec_.begin_of_text) = id;
    }
    return absl::OkStatus();
  }

  const JsonFields fields_;
  TokenizerSpec spec_;
};

}  // namespace

absl::StatusOr<TokenizerSpec> ParseTokenizerJson(const Json& json) { return Parser(json).Parse(); }

}  // namespace heavywater
