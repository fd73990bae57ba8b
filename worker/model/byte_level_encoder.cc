#include <unicode/unorm2.h>

#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "cache_service/base/status.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/byte_pair_merger.h"
#include "worker/model/message.h"
#include "worker/model/pre_tokenizer.h"
#include "worker/model/segment_encoder.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

bool IsAscii(std::string_view text) {
  for (const char byte : text) {
    if (static_cast<unsigned char>(byte) >= 0x80) return false;
  }
  return true;
}

std::u16string ToUtf16(std::string_view text) {
  std::u16string units;
  while (!text.empty()) {
    const Utf8Step step = DecodeUtf8(text);
    const char32_t point = step.code_point;
    if (point >= 0x10000) {
      units.push_back(static_cast<char16_t>(0xd7c0 + (point >> 10)));
      units.push_back(static_cast<char16_t>(0xdc00 + (point & 0x3ff)));
    } else {
      units.push_back(static_cast<char16_t>(point));
    }
    text.remove_prefix(static_cast<size_t>(step.bytes));
  }
  return units;
}

std::string ToUtf8(std::u16string_view units) {
  std::string text;
  for (size_t i = 0; i < units.size(); ++i) {
    char32_t point = units[i];
    if (point >= 0xd800 && point < 0xdc00 && i + 1 < units.size()) {
      point = ((point - 0xd7c0) << 10) + (units[++i] - 0xdc00u);
    }
    AppendUtf8(point, text);
  }
  return text;
}

// Unicode's canonical composition (NFC). `text` is valid; so is the result.
std::string Composed(std::string_view text) {
  if (IsAscii(text)) return std::string(text);
  UErrorCode error = U_ZERO_ERROR;
  const UNormalizer2* const normalizer = unorm2_getNFCInstance(&error);
  if (U_FAILURE(error)) return std::string(text);  // ICU without its data: never as installed
  const std::u16string from = ToUtf16(text);
  const auto size = static_cast<int32_t>(from.size());
  std::u16string to(3 * from.size(), u'\0');  // NFC grows UTF-16 at most threefold
  const int32_t length = unorm2_normalize(normalizer, from.data(), size, to.data(),
                                          static_cast<int32_t>(to.size()), &error);
  if (U_FAILURE(error)) return std::string(text);
  return ToUtf8(std::u16string_view(to).substr(0, static_cast<size_t>(length)));
}

// Encodes the words of one text. Texts repeat their words, so it remembers the
// tokens of each; it lives for one call, which bounds the memory by the text.
class WordMemory {
 public:
  // The tokens of a word, made by encode(word, tokens) the first time.
  template <class Encode>
  void Append(std::string_view word, const Encode& encode, std::vector<int32_t>& tokens) {
    const auto [entry, is_new] = known_.try_emplace(word);
    if (is_new) {
      entry->second.begin = known_tokens_.size();
      encode(word, known_tokens_);
      entry->second.size = known_tokens_.size() - entry->second.begin;
    }
    const auto begin = known_tokens_.begin() + static_cast<ptrdiff_t>(entry->second.begin);
    tokens.insert(tokens.end(), begin, begin + static_cast<ptrdiff_t>(entry->second.size));
  }

 private:
  // Tokens of a word: a range of `known_tokens_`.
  struct Known {
    size_t begin = 0;
    size_t size = 0;
  };

  absl::flat_hash_map<std::string_view, Known> known_;
  std::vector<int32_t> known_tokens_;
};

class ByteLevelEncoder final : public SegmentEncoder {
 public:
  ByteLevelEncoder(const TokenizerSpec& spec, WordPattern pattern, BytePairMerger merger)
      : pattern_(pattern), merger_(std::move(merger)) {
    if (!spec.whole_words_first) return;
    for (size_t id = 0; id < spec.tokens.size(); ++id) {
      auto bytes = AlphabetToBytes(spec.tokens[id]);
      if (spec.token_types[id] != TokenType::kNormal || !bytes.has_value()) continue;
      whole_words_.emplace(*std::move(bytes), static_cast<int32_t>(id));
    }
  }

  void Encode(std::string_view text, SegmentPlace, std::vector<int32_t>& tokens) const override {
    if (pattern_ == WordPattern::kQwen2) {
      EncodeWords(Composed(text), tokens);
    } else {
      EncodeWords(text, tokens);
    }
  }

 private:
  void EncodeWords(std::string_view text, std::vector<int32_t>& tokens) const {
    WordMemory memory;
    const auto encode = [this](std::string_view word, std::vector<int32_t>& to) {
      const auto whole = whole_words_.find(absl::string_view(word.data(), word.size()));
      if (whole == whole_words_.end()) return merger_.Encode(word, to);
      to.push_back(whole->second);
    };
    for (const std::string_view word : SplitWords(text, pattern_)) {
      memory.Append(word, encode, tokens);
    }
  }

  const WordPattern pattern_;
  const BytePairMerger merger_;
  absl::flat_hash_map<std::string, int32_t> whole_words_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const SegmentEncoder>> CreateByteLevelEncoder(
    const TokenizerSpec& spec) {
  HW_ASSIGN_OR_RETURN(const WordPattern pattern, FindWordPattern(spec.pre_tokenizer));
  HW_ASSIGN_OR_RETURN(BytePairMerger merger, BytePairMerger::Create(spec));
  return std::make_shared<ByteLevelEncoder>(spec, pattern, std::move(merger));
}

}  // namespace heavywater
