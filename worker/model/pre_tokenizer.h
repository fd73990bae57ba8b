// Cuts text into the words within which byte pairs are merged.
#pragma once

#include <string_view>
#include <vector>

namespace heavywater {

// The pre-tokenizer "smollm": every number character (\p{N}) alone; what is
// between them by GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// `text` must be valid UTF-8. The words are views of it, in order, and cover it.
std::vector<std::string_view> SplitWords(std::string_view text);

}  // namespace heavywater
