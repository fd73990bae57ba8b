// UTF-8, as Unicode defines it: shortest forms only, no surrogates.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace heavywater {

struct Utf8Step {
  enum Kind { kValid, kInvalid, kIncomplete } kind = kInvalid;
  int bytes = 0;            // of the code point; kInvalid: how many to replace by one U+FFFD;
                            // kIncomplete: all that is left, and more could make it valid
  char32_t code_point = 0;  // kValid
};

// INVALID_ARGUMENT with `what` and the offset when `text` is not UTF-8.
absl::Status CheckUtf8(std::string_view what, std::string_view text);
// Likewise, and when it is longer than a text of a model's file (a name, a template) is.
inline constexpr size_t kMaxTextBytes = size_t{1} << 20;
absl::Status CheckText(std::string_view what, std::string_view text);

// What stands at the start of `text`, which must not be empty.
Utf8Step DecodeUtf8(std::string_view text);

void AppendUtf8(char32_t code_point, std::string& text);

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD

}  // namespace heavywater
