// Everything that defines a tokenizer, as the model's file carries it. What
// GetModel serves, so that a client can build the same tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

class GgufFile;

// tokenizer.ggml.token_type.
enum class TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,      // marks structure: not part of a text
  kUserDefined = 4,  // found in any text as it stands, before everything else
  kUnused = 5,
  kByte = 6,  // "<0x0A>": a byte of a character that is no token
};

// Where a text gets a space before its first word.
enum class SpacePrefix {
  kNever,
  kEverySegment,           // also behind each control token
  kEverySegmentButSpaces,  // likewise, unless there is one already
  kStartButSpaces,         // only at the start, unless there is one already
};

inline constexpr int32_t kNoToken = -1;

struct TokenizerSpec {
  std::string model;                   // "gpt2": byte-level byte-pair encoding; "llama":
                                       // SentencePiece's, of characters
  std::string pre_tokenizer;           // "smollm", "llama-bpe", "qwen2"; empty for "llama"
  std::vector<std::string> tokens;     // [vocab_size], in GPT-2's alphabet of bytes, or with
                                       // U+2581 for space
  std::vector<TokenType> token_types;  // [vocab_size]
  std::vector<std::string> merges;     // "left right", best first
  std::vector<float> scores;           // [vocab_size] where "llama" has no merges; higher first
  SpacePrefix space_prefix = SpacePrefix::kNever;  // of "llama"
  bool whole_words_first = false;  // of "gpt2": a word that is a token is not built by merges
  int32_t begin_of_text = kNoToken;
  int32_t end_of_turn = kNoToken;   // generation stops here
  std::vector<int32_t> other_ends;  // and at these
  int32_t unknown = kNoToken;
  bool adds_begin_of_text = false;  // prompts begin with begin_of_text
  bool adds_end_of_text = false;    // and end with end_of_turn
  std::string chat_template;        // Jinja; empty when there is none
};

// The byte of a token that reads "<0x0A>" (two hexadecimal digits of either case), or
// nothing.
std::optional<uint8_t> ByteOf(std::string_view token);

// Sets what follows from the pre-tokenizer's name. UNIMPLEMENTED for another than those
// above (or another name that GGUF has for one of them), naming `field`, it and them.
absl::Status SetPreTokenizer(const std::string& field, const std::string& name,
                             TokenizerSpec& spec);

// Models have rows for tokens that no tokenizer has: names for them, of type kUnused.
// INVALID_ARGUMENT when the vocabulary is larger than the model's.
absl::Status FillVocabulary(int vocab_size, TokenizerSpec& spec);

// INVALID_ARGUMENT or NOT_FOUND naming the field; UNIMPLEMENTED for a tokenizer other
// than "gpt2" with a pre-tokenizer above and "llama".
absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const GgufFile& file);

}  // namespace heavywater
