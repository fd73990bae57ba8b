// Tokens to text as they come.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace heavywater {

class Tokenizer;

// A character may be spread over several tokens: its bytes are held back until
// it is whole. The pieces together are Tokenizer::Decode() of all tokens.
// `tokenizer` must outlive this.
class StreamingDecoder {
 public:
  explicit StreamingDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The text that `token` completes, valid UTF-8; perhaps empty. INVALID_ARGUMENT
  // for an id outside the vocabulary, which changes nothing.
  absl::StatusOr<std::string> Add(int32_t token);

  // What is still held back (U+FFFD), and starts anew.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  std::string held_;  // the start of a character, at most 3 bytes
};

}  // namespace heavywater
