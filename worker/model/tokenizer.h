// Text to tokens and back.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/byte_pair_merger.h"
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
  static absl::StatusOr<Tokenizer> Create(TokenizerSpec spec);

  const TokenizerSpec& spec() const { return spec_; }
  int vocab_size() const { return static_cast<int>(spec_.tokens.size()); }
  bool IsEndOfTurn(int32_t token) const { return token == spec_.end_of_turn; }

  // Adds nothing (not begin_of_text either). INVALID_ARGUMENT with the offset
  // when `text` is not UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, ControlTokens control) const;

  // Valid UTF-8: bytes that form no character become U+FFFD. Control tokens
  // yield nothing. INVALID_ARGUMENT for an id outside the vocabulary.
  absl::StatusOr<std::string> Decode(std::span<const int32_t> tokens) const;

  // The bytes of one token, perhaps a part of a character. Nothing for control
  // tokens. INVALID_ARGUMENT as above.
  absl::StatusOr<std::string_view> TokenBytes(int32_t token) const;

 private:
  Tokenizer(TokenizerSpec spec, BytePairMerger merger)
      : spec_(std::move(spec)), merger_(std::move(merger)) {}

  absl::Status IndexTokens();
  // The longest control token at the start of `text`, or kNoToken.
  int32_t ControlTokenAt(std::string_view text) const;

  TokenizerSpec spec_;
  BytePairMerger merger_;
  std::vector<std::string> bytes_;       // [vocab_size], of each token
  std::vector<int32_t> control_tokens_;  // longest first
  std::string control_starts_;           // the bytes with which they start
};

}  // namespace heavywater
