// Text between control tokens to tokens: what kinds of tokenizers do differently.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

// Where a segment stands in a text.
enum class SegmentPlace {
  kStart,        // nothing precedes it
  kBehindToken,  // a control or user-defined token does
  kContinues,    // text does, which has been encoded already: no space is put before it
};

// Immutable and thread safe.
class SegmentEncoder {
 public:
  virtual ~SegmentEncoder() = default;

  // Appends the tokens of `text`, valid UTF-8.
  virtual void Encode(std::string_view text, SegmentPlace place,
                      std::vector<int32_t>& tokens) const = 0;
};

// Byte-pair encoding of the bytes of words (model "gpt2"). INVALID_ARGUMENT as
// BytePairMerger::Create(), UNIMPLEMENTED for a pre-tokenizer that is not known.
absl::StatusOr<std::shared_ptr<const SegmentEncoder>> CreateByteLevelEncoder(
    const TokenizerSpec& spec);

// SentencePiece's byte-pair encoding of characters (model "llama"; Kudo and Richardson,
// arXiv:1808.06226): spaces are U+2581, words are not cut apart, a character that is no
// token becomes its bytes' tokens, or the unknown token. Merges come in the order of the
// spec's merges or, without them, of the scores of what they make, ties to the left.
absl::StatusOr<std::shared_ptr<const SegmentEncoder>> CreateSentencePieceEncoder(
    const TokenizerSpec& spec);

}  // namespace heavywater
