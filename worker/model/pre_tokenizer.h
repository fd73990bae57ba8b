// Cuts text into the words within which byte pairs are merged.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

enum class WordPattern {
  // "smollm": every number character (\p{N}) alone; what is between them by GPT-2's pattern
  //   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kSmolLm,
  // "llama-bpe":
  //   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
  //    ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
  kLlama3,
  // "qwen2": likewise, but \p{N} alone; its texts are in Unicode's form NFC.
  kQwen2,
};

// Of a pre-tokenizer's name in TokenizerSpec. UNIMPLEMENTED for another, naming it.
absl::StatusOr<WordPattern> FindWordPattern(std::string_view pre_tokenizer);

// `text` must be valid UTF-8. The words are views of it, in order, and cover it.
std::vector<std::string_view> SplitWords(std::string_view text, WordPattern pattern);

}  // namespace heavywater
