// Text to tokens and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/segment_encoder.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

// What Encode does with text that reads like a control token ("<|im_start|>").
enum class ControlTokens {
  kAsText,   // ordinary characters: for text from outside
  kAsToken,  // the token: for text from a chat template
};

// Immutable and thread safe.
class Tokenizer {
 public:
  // INVALID_ARGUMENT naming what of the spec does not fit: lists of unequal lengths, tokens
  // above 64 KiB, scores that are no finite numbers, byte tokens that name no byte, merges
  // of what is no token; UNIMPLEMENTED for a pre-tokenizer that is not known.
  static absl::StatusOr<Tokenizer> Create(TokenizerSpec spec);

  const TokenizerSpec& spec() const { return spec_; }
  int vocab_size() const { return static_cast<int>(spec_.tokens.size()); }
  bool IsEndOfTurn(int32_t token) const {
    return token == spec_.end_of_turn || std::ranges::count(spec_.other_ends, token) > 0;
  }

  // Adds nothing (not begin_of_text either). INVALID_ARGUMENT with the offset
  // when `text` is not UTF-8. `place`: what precedes the text.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, ControlTokens control,
                                              SegmentPlace place = SegmentPlace::kStart) const;

  // What a model is given for a text: control tokens recognised, with begin_of_text
  // (unless the text has it, as some chat templates write it) and end_of_turn where the
  // spec says so. A suffix, when there is one, continues the prompt and has its end.
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(std::string_view text,
                                                    bool has_suffix = false) const;
  absl::StatusOr<std::vector<int32_t>> EncodeSuffix(std::string_view text) const;

  // Valid UTF-8: bytes that form no character become U+FFFD. Control tokens
  // yield nothing; a space that the spec puts before texts stays. INVALID_ARGUMENT for an
  // id outside the vocabulary.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> tokens) const;

  // The bytes of one token, perhaps a part of a character. Nothing for control
  // tokens. INVALID_ARGUMENT as above.
  absl::StatusOr<std::string_view> TokenBytes(int32_t token) const;

 private:
  explicit Tokenizer(TokenizerSpec spec) : spec_(std::move(spec)) {}

  absl::Status IndexTokens();
  void AddEnd(std::vector<int32_t>& tokens) const;
  absl::StatusOr<std::string> BytesOf(size_t token) const;
  // The longest control or user-defined token at the start of `text`, or kNoToken.
  int32_t WholeTokenAt(std::string_view text, ControlTokens control) const;

  TokenizerSpec spec_;
  std::shared_ptr<const SegmentEncoder> encoder_;
  std::vector<std::string> bytes_;     // [vocab_size], of each token
  std::vector<int32_t> whole_tokens_;  // control and user-defined, longest first
  std::string whole_starts_;           // the bytes with which they start
};

}  // namespace heavywater
