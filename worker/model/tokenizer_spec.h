// Everything that defines a tokenizer, as the model's file carries it. What
// GetModel serves, so that a client can build the same tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_file.h"

namespace heavywater {

// tokenizer.ggml.token_type.
enum class TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,  // marks structure: not part of a text
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

inline constexpr int32_t kNoToken = -1;

struct TokenizerSpec {
  std::string model;                   // "gpt2": byte-level byte-pair encoding
  std::string pre_tokenizer;           // "smollm"
  std::vector<std::string> tokens;     // [vocab_size], in GPT-2's alphabet of bytes
  std::vector<TokenType> token_types;  // [vocab_size]
  std::vector<std::string> merges;     // "left right", best first
  int32_t begin_of_text = kNoToken;
  int32_t end_of_turn = kNoToken;  // generation stops here
  int32_t unknown = kNoToken;
  int32_t padding = kNoToken;
  bool adds_begin_of_text = false;  // prompts begin with begin_of_text
  std::string chat_template;        // Jinja; empty when there is none
};

// INVALID_ARGUMENT or NOT_FOUND naming the field; UNIMPLEMENTED for a tokenizer
// other than "gpt2" with pre-tokenizer "smollm".
absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const GgufFile& file);

}  // namespace heavywater
