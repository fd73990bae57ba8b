#include "worker/model/tokenizer.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "cache_service/base/status.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/message.h"
#include "worker/model/pre_tokenizer.h"
#include "worker/model/streaming_decoder.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

absl::Status CheckUtf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    const Utf8Step step = DecodeUtf8(text.substr(offset));
    if (step.kind != Utf8Step::kValid) {
      return absl::InvalidArgumentError(Message("text is not UTF-8 at byte ", offset));
    }
    offset += static_cast<size_t>(step.bytes);
  }
  return absl::OkStatus();
}

// Encodes the words of one text. Texts repeat their words, so it remembers the
// tokens of each; it lives for one call, which bounds the memory by the text.
class WordEncoder {
 public:
  explicit WordEncoder(const BytePairMerger& merger) : merger_(merger) {}

  void Encode(std::string_view text, std::vector<int32_t>& tokens) {
    for (const std::string_view word : SplitWords(text)) EncodeWord(word, tokens);
  }

 private:
  // Tokens of a word: a range of `known_tokens_`.
  struct Known {
    size_t begin = 0;
    size_t size = 0;
  };

  void EncodeWord(std::string_view word, std::vector<int32_t>& tokens) {
    const auto [entry, is_new] = known_.try_emplace(word);
    if (is_new) {
      entry->second.begin = known_tokens_.size();
      merger_.Encode(word, known_tokens_);
      entry->second.size = known_tokens_.size() - entry->second.begin;
    }
    const auto begin = known_tokens_.begin() + static_cast<ptrdiff_t>(entry->second.begin);
    tokens.insert(tokens.end(), begin, begin + static_cast<ptrdiff_t>(entry->second.size));
  }

  const BytePairMerger& merger_;
  absl::flat_hash_map<std::string_view, Known> known_;
  std::vector<int32_t> known_tokens_;
};

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::Create(TokenizerSpec spec) {
  HW_ASSIGN_OR_RETURN(BytePairMerger merger, BytePairMerger::Create(spec));
  Tokenizer tokenizer(std::move(spec), std::move(merger));
  HW_RETURN_IF_ERROR(tokenizer.IndexTokens());
  return tokenizer;
}

absl::Status Tokenizer::IndexTokens() {
  if (spec_.token_types.size() != spec_.tokens.size()) {
    return absl::InvalidArgumentError(Message("there are ", spec_.token_types.size(),
                                              " token types, want ", spec_.tokens.size()));
  }
  bytes_.resize(spec_.tokens.size());
  for (size_t i = 0; i < spec_.tokens.size(); ++i) {
    const std::string& token = spec_.tokens[i];
    if (spec_.token_types[i] == TokenType::kControl) {
      if (token.empty()) return absl::InvalidArgumentError("a control token is empty");
      control_tokens_.push_back(static_cast<int32_t>(i));
      control_starts_.push_back(token[0]);
      continue;
    }
    auto bytes = AlphabetToBytes(token);
    if (!bytes.has_value()) {
      return absl::InvalidArgumentError(
          Message("token ", i, ", ", Quoted(token), ", is not in GPT-2's alphabet of bytes"));
    }
    bytes_[i] = *std::move(bytes);
  }
  std::stable_sort(control_tokens_.begin(), control_tokens_.end(), [this](int32_t a, int32_t b) {
    return spec_.tokens[static_cast<size_t>(a)].size() >
           spec_.tokens[static_cast<size_t>(b)].size();
  });
  return absl::OkStatus();
}

int32_t Tokenizer::ControlTokenAt(std::string_view text) const {
  for (const int32_t id : control_tokens_) {
    const std::string& token = spec_.tokens[static_cast<size_t>(id)];
    if (text.substr(0, token.size()) == token) return id;
  }
  return kNoToken;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                       ControlTokens control) const {
  HW_RETURN_IF_ERROR(CheckUtf8(text));
  std::vector<int32_t> tokens;
  WordEncoder encoder(merger_);
  size_t begin = 0;  // of the text not yet encoded
  size_t offset = control == ControlTokens::kAsText ? text.size() : 0;
  while ((offset = text.find_first_of(control_starts_, offset)) != std::string_view::npos) {
    const int32_t token = ControlTokenAt(text.substr(offset));
    if (token == kNoToken) {
      ++offset;
      continue;
    }
    encoder.Encode(text.substr(begin, offset - begin), tokens);
    tokens.push_back(token);
    begin = offset += spec_.tokens[static_cast<size_t>(token)].size();
  }
  encoder.Encode(text.substr(begin), tokens);
  return tokens;
}

absl::StatusOr<std::string_view> Tokenizer::TokenBytes(int32_t token) const {
  if (token < 0 || token >= vocab_size()) {
    return absl::InvalidArgumentError(
        Message("token is ", token, ", want 0 or more and less than ", vocab_size()));
  }
  return std::string_view(bytes_[static_cast<size_t>(token)]);
}

absl::StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> tokens) const {
  StreamingDecoder decoder(*this);
  std::string text;
  for (const int32_t token : tokens) {
    HW_ASSIGN_OR_RETURN(const std::string piece, decoder.Add(token));
    text += piece;
  }
  return text + decoder.Finish();
}

}  // namespace heavywater
