#include "worker/model/tokenizer.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "cache_service/base/status.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/message.h"
#include "worker/model/streaming_decoder.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

constexpr size_t kMaxTokenBytes = 64 << 10;  // published ones have some hundred

// A SentencePiece token's text: spaces as spaces.
std::string PlainBytes(std::string_view token) {
  constexpr std::string_view kSpace = "\u2581";
  std::string bytes;
  while (!token.empty()) {
    const size_t space = std::min(token.find(kSpace), token.size());
    bytes += token.substr(0, space);
    token.remove_prefix(space);
    if (token.empty()) break;
    bytes.push_back(' ');
    token.remove_prefix(kSpace.size());
  }
  return bytes;
}

absl::Status CheckScores(const TokenizerSpec& spec) {
  if (spec.scores.empty()) return absl::OkStatus();
  if (spec.scores.size() != spec.tokens.size()) {
    return absl::InvalidArgumentError(
        Message("there are ", spec.scores.size(), " scores, want ", spec.tokens.size()));
  }
  for (size_t i = 0; i < spec.scores.size(); ++i) {
    if (std::isfinite(spec.scores[i])) continue;
    return absl::InvalidArgumentError(
        Message("the score of token ", i, " is ", spec.scores[i], ", want a finite number"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::Create(TokenizerSpec spec) {
  if (spec.token_types.size() != spec.tokens.size()) {
    return absl::InvalidArgumentError(
        Message("there are ", spec.token_types.size(), " token types, want ", spec.tokens.size()));
  }
  HW_RETURN_IF_ERROR(CheckScores(spec));
  Tokenizer tokenizer(std::move(spec));
  HW_ASSIGN_OR_RETURN(tokenizer.encoder_, tokenizer.spec_.model == "llama"
                                              ? CreateSentencePieceEncoder(tokenizer.spec_)
                                              : CreateByteLevelEncoder(tokenizer.spec_));
  HW_RETURN_IF_ERROR(tokenizer.IndexTokens());
  return tokenizer;
}

absl::Status Tokenizer::IndexTokens() {
  bytes_.resize(spec_.tokens.size());
  for (size_t i = 0; i < spec_.tokens.size(); ++i) {
    const std::string& token = spec_.tokens[i];
    const TokenType type = spec_.token_types[i];
    if (token.size() > kMaxTokenBytes) {
      return absl::InvalidArgumentError(
          Message("token ", i, " has ", token.size(), " bytes, limit ", kMaxTokenBytes));
    }
    HW_ASSIGN_OR_RETURN(bytes_[i], BytesOf(i));
    if (type != TokenType::kControl && type != TokenType::kUserDefined) continue;
    if (token.empty()) return absl::InvalidArgumentError("a control token is empty");
    whole_tokens_.push_back(static_cast<int32_t>(i));
    if (whole_starts_.find(token[0]) == std::string::npos) whole_starts_.push_back(token[0]);
  }
  std::stable_sort(whole_tokens_.begin(), whole_tokens_.end(), [this](int32_t a, int32_t b) {
    return spec_.tokens[static_cast<size_t>(a)].size() >
           spec_.tokens[static_cast<size_t>(b)].size();
  });
  return absl::OkStatus();
}

absl::StatusOr<std::string> Tokenizer::BytesOf(size_t token) const {
  const std::string& text = spec_.tokens[token];
  const TokenType type = spec_.token_types[token];
  if (type == TokenType::kControl || type == TokenType::kUnused) return "";
  if (spec_.model == "llama") {
    if (type == TokenType::kUnknown) return "";
    if (type != TokenType::kByte) return PlainBytes(text);
    const std::optional<uint8_t> byte = ByteOf(text);
    if (byte.has_value()) return std::string(1, static_cast<char>(*byte));
    return absl::InvalidArgumentError(
        Message("token ", token, " of type byte is ", Quoted(text), ", want <0x00> to <0xFF>"));
  }
  if (type == TokenType::kUserDefined) return text;
  auto bytes = AlphabetToBytes(text);
  if (bytes.has_value()) return *std::move(bytes);
  return absl::InvalidArgumentError(
      Message("token ", token, ", ", Quoted(text), ", is not in GPT-2's alphabet of bytes"));
}

int32_t Tokenizer::WholeTokenAt(std::string_view text, ControlTokens control) const {
  for (const int32_t id : whole_tokens_) {
    const auto index = static_cast<size_t>(id);
    const std::string& token = spec_.tokens[index];
    if (control == ControlTokens::kAsText && spec_.token_types[index] == TokenType::kControl) {
      continue;
    }
    if (text.substr(0, token.size()) == token) return id;
  }
  return kNoToken;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, ControlTokens control,
                                                       SegmentPlace place) const {
  HW_RETURN_IF_ERROR(CheckUtf8("text", text));
  std::vector<int32_t> tokens;
  size_t begin = 0;  // of the text not yet encoded
  size_t offset = 0;
  while ((offset = text.find_first_of(whole_starts_, offset)) != std::string_view::npos) {
    const int32_t token = WholeTokenAt(text.substr(offset), control);
    if (token == kNoToken) {
      ++offset;
      continue;
    }
    encoder_->Encode(text.substr(begin, offset - begin), place, tokens);
    place = SegmentPlace::kBehindToken;
    tokens.push_back(token);
    begin = offset += spec_.tokens[static_cast<size_t>(token)].size();
  }
  encoder_->Encode(text.substr(begin), place, tokens);
  return tokens;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodePrompt(std::string_view text,
                                                             bool has_suffix) const {
  HW_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, Encode(text, ControlTokens::kAsToken));
  const bool begins = !tokens.empty() && tokens.front() == spec_.begin_of_text;
  if (spec_.adds_begin_of_text && spec_.begin_of_text != kNoToken && !begins) {
    tokens.insert(tokens.begin(), spec_.begin_of_text);
  }
  if (!has_suffix) AddEnd(tokens);
  return tokens;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodeSuffix(std::string_view text) const {
  HW_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                      Encode(text, ControlTokens::kAsToken, SegmentPlace::kContinues));
  AddEnd(tokens);
  return tokens;
}

void Tokenizer::AddEnd(std::vector<int32_t>& tokens) const {
  if (spec_.adds_end_of_text && spec_.end_of_turn != kNoToken) tokens.push_back(spec_.end_of_turn);
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
