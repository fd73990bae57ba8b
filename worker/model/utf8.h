// UTF-8, as Unicode defines it: shortest forms only, no surrogates.
#pragma once

#include <string>
#include <string_view>

namespace heavywater {

struct Utf8Step {
  enum Kind { kValid, kInvalid, kIncomplete } kind = kInvalid;
  int bytes = 0;            // of the code point; kInvalid: how many to replace by one U+FFFD;
                            // kIncomplete: all that is left, and more could make it valid
  char32_t code_point = 0;  // kValid
};

// What stands at the start of `text`, which must not be empty.
Utf8Step DecodeUtf8(std::string_view text);

void AppendUtf8(char32_t code_point, std::string& text);

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD

}  // namespace heavywater
