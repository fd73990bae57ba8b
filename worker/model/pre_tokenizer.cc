#include "worker/model/pre_tokenizer.h"

#include <unicode/uchar.h>

#include <array>
#include <cstddef>

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

class Splitter {
 public:
  explicit Splitter(std::string_view text) : text_(text) {}

  bool done() const { return begin_ == text_.size(); }

  std::string_view Next() {
    const size_t end = WordEnd();
    const std::string_view word = text_.substr(begin_, end - begin_);
    begin_ = end;
    return word;
  }

 private:
  struct Char {
    CharClass kind;
    size_t end;
  };

  // The character that starts at `offset`, which lies inside the text.
  Char At(size_t offset) const {
    const Utf8Step step = DecodeUtf8(text_.substr(offset));
    return {ClassOf(step.code_point), offset + static_cast<size_t>(step.bytes)};
  }

  // The end of the run of `kind` from `offset`.
  size_t RunEnd(size_t offset, CharClass kind) const {
    while (offset < text_.size()) {
      const Char next = At(offset);
      if (next.kind != kind) break;
      offset = next.end;
    }
    return offset;
  }

  // The alternatives of the pattern, in its order.
  size_t WordEnd() const {
    if (const size_t end = ContractionEnd(); end > begin_) return end;
    const Char first = At(begin_);
    if (first.kind == CharClass::kNumber) return first.end;
    if (first.kind != CharClass::kSpace) return RunEnd(first.end, first.kind);
    if (text_[begin_] == ' ' && first.end < text_.size()) {
      const Char second = At(first.end);
      if (second.kind == CharClass::kLetter || second.kind == CharClass::kOther) {
        return RunEnd(second.end, second.kind);
      }
    }
    return SpacesEnd(first);
  }

  size_t ContractionEnd() const {
    if (text_[begin_] != '\'') return begin_;
    for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      if (text_.substr(begin_, ending.size()) == ending) return begin_ + ending.size();
    }
    return begin_;
  }

  // A run of spaces leaves its last one to the word behind it. Numbers were cut
  // out before the pattern ran, so a run before a number is whole.
  size_t SpacesEnd(const Char& first) const {
    size_t last = begin_;  // start of the run's last character
    size_t end = first.end;
    while (end < text_.size()) {
      const Char next = At(end);
      if (next.kind == CharClass::kNumber) return end;
      if (next.kind != CharClass::kSpace) return last > begin_ ? last : end;
      last = end;
      end = next.end;
    }
    return end;
  }

  const std::string_view text_;
  size_t begin_ = 0;
};

}  // namespace

std::vector<std::string_view> SplitWords(std::string_view text) {
  std::vector<std::string_view> words;
  Splitter splitter(text);
  while (!splitter.done()) words.push_back(splitter.Next());
  return words;
}

}  // namespace heavywater
