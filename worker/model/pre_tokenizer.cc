#include "worker/model/pre_tokenizer.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>

#include "worker/model/message.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

enum class CharClass : char { kSpace, kLetter, kNumber, kOther };

CharClass Classify(char32_t code_point) {
  const auto character = static_cast<UChar32>(code_point);
  const uint32_t category = U_GET_GC_MASK(character);
  if (category & U_GC_L_MASK) return CharClass::kLetter;
  if (category & U_GC_N_MASK) return CharClass::kNumber;
  return u_isUWhiteSpace(character) ? CharClass::kSpace : CharClass::kOther;
}

// Text is mostly ASCII: look that up.
CharClass ClassOf(char32_t code_point) {
  static const auto* const ascii = [] {
    auto* table = new std::array<CharClass, 128>;
    for (char32_t c = 0; c < table->size(); ++c) (*table)[c] = Classify(c);
    return table;
  }();
  return code_point < ascii->size() ? (*ascii)[code_point] : Classify(code_point);
}

// Walks over a text word by word; Pattern::WordEnd(reader, begin) says where a word ends.
class Reader {
 public:
  struct Char {
    CharClass kind;
    size_t end;
  };

  explicit Reader(std::string_view text) : text_(text) {}

  size_t size() const { return text_.size(); }
  char operator[](size_t offset) const { return text_[offset]; }
  std::string_view From(size_t offset) const { return text_.substr(offset); }

  // The character that starts at `offset`, which lies inside the text.
  Char At(size_t offset) const {
    const Utf8Step step = DecodeUtf8(text_.substr(offset));
    return {ClassOf(step.code_point), offset + static_cast<size_t>(step.bytes)};
  }

  // The end of the run of `kind` from `offset`, at most `most` characters.
  size_t RunEnd(size_t offset, CharClass kind, int most = INT_MAX) const {
    for (; most > 0 && offset < text_.size(); --most) {
      const Char next = At(offset);
      if (next.kind != kind) break;
      offset = next.end;
    }
    return offset;
  }

 private:
  const std::string_view text_;
};

struct SmolLmPattern {
  // The alternatives of the pattern, in its order.
  static size_t WordEnd(const Reader& text, size_t begin) {
    if (const size_t end = ContractionEnd(text, begin); end > begin) return end;
    const Reader::Char first = text.At(begin);
    if (first.kind == CharClass::kNumber) return first.end;
    if (first.kind != CharClass::kSpace) return text.RunEnd(first.end, first.kind);
    if (text[begin] == ' ' && first.end < text.size()) {
      const Reader::Char second = text.At(first.end);
      if (second.kind == CharClass::kLetter || second.kind == CharClass::kOther) {
        return text.RunEnd(second.end, second.kind);
      }
    }
    return SpacesEnd(text, begin, first);
  }

  static size_t ContractionEnd(const Reader& text, size_t begin) {
    if (text[begin] != '\'') return begin;
    for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      if (text.From(begin).substr(0, ending.size()) == ending) return begin + ending.size();
    }
    return begin;
  }

  // A run of spaces leaves its last one to the word behind it. Numbers were cut
  // out before the pattern ran, so a run before a number is whole.
  static size_t SpacesEnd(const Reader& text, size_t begin, const Reader::Char& first) {
    size_t last = begin;
    size_t end = first.end;
    while (end < text.size()) {
      const Reader::Char next = text.At(end);
      if (next.kind == CharClass::kNumber) return end;
      if (next.kind != CharClass::kSpace) return last > begin ? last : end;
      last = end;
      end = next.end;
    }
    return end;
  }
};

// Llama 3's and Qwen 2's patterns, which differ in how many digits are a word.
template <int kDigits>
struct Llama3Pattern {
  static size_t WordEnd(const Reader& text, size_t begin) {
    if (const size_t end = ContractionEnd(text, begin); end > begin) return end;
    const Reader::Char first = text.At(begin);
    if (first.kind == CharClass::kLetter) return text.RunEnd(first.end, CharClass::kLetter);
    if (first.kind == CharClass::kNumber) {
      return text.RunEnd(begin, CharClass::kNumber, kDigits);
    }
    if (const size_t end = LettersBehind(text, begin, first); end > begin) return end;
    if (const size_t end = OthersEnd(text, begin, first); end > begin) return end;
    return SpacesEnd(text, begin);
  }

 private:
  static bool IsNewline(char byte) { return byte == '\r' || byte == '\n'; }

  static size_t ContractionEnd(const Reader& text, size_t begin) {
    if (text[begin] != '\'') return begin;
    const std::string_view rest = text.From(begin + 1);
    constexpr std::string_view kLongS = "\u017f";  // an s, where case does not matter
    if (rest.substr(0, kLongS.size()) == kLongS) return begin + 1 + kLongS.size();
    for (const std::string_view ending : {"s", "t", "re", "ve", "m", "ll", "d"}) {
      if (EqualsIgnoringCase(rest.substr(0, ending.size()), ending)) {
        return begin + 1 + ending.size();
      }
    }
    return begin;
  }

  static bool EqualsIgnoringCase(std::string_view text, std::string_view lower) {
    return std::ranges::equal(text, lower, [](char a, char b) { return (a | 0x20) == b; });
  }

  // Letters with one character before them, which is no newline.
  static size_t LettersBehind(const Reader& text, size_t begin, const Reader::Char& first) {
    if (IsNewline(text[begin]) || first.end == text.size()) return begin;
    const size_t end = text.RunEnd(first.end, CharClass::kLetter);
    return end > first.end ? end : begin;
  }

  // Perhaps a space, a run of other characters, and newlines.
  static size_t OthersEnd(const Reader& text, size_t begin, const Reader::Char& first) {
    const size_t others = text[begin] == ' ' ? first.end : begin;
    size_t end = text.RunEnd(others, CharClass::kOther);
    if (end == others) return begin;
    while (end < text.size() && IsNewline(text[end])) ++end;
    return end;
  }

  // A run of spaces up to its last newline; without one it leaves its last character to
  // the word behind it.
  static size_t SpacesEnd(const Reader& text, size_t begin) {
    size_t last = begin;  // the run's last character
    size_t end = begin;
    size_t newline_end = begin;
    while (end < text.size()) {
      const Reader::Char next = text.At(end);
      if (next.kind != CharClass::kSpace) break;
      last = end;
      if (IsNewline(text[end])) newline_end = next.end;
      end = next.end;
    }
    if (newline_end > begin) return newline_end;
    return end == text.size() || last == begin ? end : last;
  }
};

template <class Pattern>
std::vector<std::string_view> Split(std::string_view text) {
  std::vector<std::string_view> words;
  const Reader reader(text);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = Pattern::WordEnd(reader, begin);
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

}  // namespace

absl::StatusOr<WordPattern> FindWordPattern(std::string_view pre_tokenizer) {
  if (pre_tokenizer == "smollm") return WordPattern::kSmolLm;
  if (pre_tokenizer == "llama-bpe") return WordPattern::kLlama3;
  if (pre_tokenizer == "qwen2") return WordPattern::kQwen2;
  return absl::UnimplementedError(Message("pre-tokenizer is ", Quoted(pre_tokenizer),
                                          ", want one of smollm, llama-bpe, qwen2"));
}

std::vector<std::string_view> SplitWords(std::string_view text, WordPattern pattern) {
  switch (pattern) {
    case WordPattern::kSmolLm:
      return Split<SmolLmPattern>(text);
    case WordPattern::kLlama3:
      return Split<Llama3Pattern<3>>(text);
    case WordPattern::kQwen2:
      return Split<Llama3Pattern<1>>(text);
  }
  return {};
}

}  // namespace heavywater
