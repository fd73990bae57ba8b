// Text of error messages.
#pragma once

#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace heavywater {

namespace message_internal {

template <typename T>
const T& Piece(const T& value) {
  return value;
}
inline absl::string_view Piece(const std::string_view& text) { return {text.data(), text.size()}; }

}  // namespace message_internal

// absl::StrCat that takes std::string_view, too: Debian's absl::string_view is a
// type of its own.
template <typename... Args>
std::string Message(const Args&... args) {
  return absl::StrCat(message_internal::Piece(args)...);
}

// A name that comes from a file: shortened and escaped, in single quotes.
inline std::string Quoted(std::string_view name) {
  constexpr size_t kMaxShown = 80;
  return Message("'", absl::CHexEscape(message_internal::Piece(name.substr(0, kMaxShown))),
                 name.size() > kMaxShown ? "...'" : "'");
}

}  // namespace heavywater
