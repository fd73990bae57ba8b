#include "worker/model/byte_alphabet.h"

#include <array>

#include "worker/model/utf8.h"

namespace heavywater {
namespace {

bool StandsForItself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) ||
         (byte >= 0xae && byte <= 0xff);
}

struct Alphabet {
  std::array<std::string, 256> characters;
  std::array<int, 256 + 256> bytes;  // by code point; -1 = none
};

const Alphabet& GetAlphabet() {
  static const Alphabet* const alphabet = [] {
    auto* result = new Alphabet;
    result->bytes.fill(-1);
    char32_t next = 256;  // the others follow in order
    for (int byte = 0; byte < 256; ++byte) {
      const char32_t code_point = StandsForItself(byte) ? static_cast<char32_t>(byte) : next++;
      AppendUtf8(code_point, result->characters[static_cast<size_t>(byte)]);
      result->bytes[code_point] = byte;
    }
    return result;
  }();
  return *alphabet;
}

}  // namespace

std::string_view ByteToAlphabet(unsigned char byte) { return GetAlphabet().characters[byte]; }

std::optional<std::string> AlphabetToBytes(std::string_view token) {
  const Alphabet& alphabet = GetAlphabet();
  std::string bytes;
  while (!token.empty()) {
    const Utf8Step step = DecodeUtf8(token);
    if (step.kind != Utf8Step::kValid || step.code_point >= alphabet.bytes.size()) return {};
    const int byte = alphabet.bytes[step.code_point];
    if (byte < 0) return {};
    bytes.push_back(static_cast<char>(byte));
    token.remove_prefix(static_cast<size_t>(step.bytes));
  }
  return bytes;
}

}  // namespace heavywater
