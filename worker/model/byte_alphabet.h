// GPT-2's alphabet: each byte as a printable character, so that any bytes can be
// written as a token. Space is U+0120, newline U+010A.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace heavywater {

// The character of a byte, in UTF-8.
std::string_view ByteToAlphabet(unsigned char byte);

// A token as written in the vocabulary to the bytes that it stands for. Empty
// when a character is not of the alphabet.
std::optional<std::string> AlphabetToBytes(std::string_view token);

}  // namespace heavywater
