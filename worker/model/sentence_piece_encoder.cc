#include <array>
#include <optional>
#include <queue>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "cache_service/base/status.h"
#include "worker/model/byte_pair_merger.h"
#include "worker/model/segment_encoder.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

constexpr std::string_view kSpace = "\u2581";

// Of UTF-8 that is valid.
size_t CharacterBytes(std::string_view text) { return static_cast<size_t>(DecodeUtf8(text).bytes); }

// Spaces as U+2581, with the one that the spec puts before a text.
std::string WithSpaces(std::string_view text, SpacePrefix prefix, SegmentPlace place) {
  if (text.empty()) return "";
  std::string out;
  const bool spaced = text[0] == ' ' || text.substr(0, kSpace.size()) == kSpace;
  const bool wanted =
      prefix == SpacePrefix::kEverySegment ||
      (prefix == SpacePrefix::kEverySegmentButSpaces && !spaced) ||
      (prefix == SpacePrefix::kStartButSpaces && !spaced && place == SegmentPlace::kStart);
  if (wanted && place != SegmentPlace::kContinues) out += kSpace;
  for (const char byte : text) {
    if (byte == ' ') {
      out += kSpace;
    } else {
      out.push_back(byte);
    }
  }
  return out;
}

// Which token a piece of text is, and how bytes are written that belong to none.
class Pieces {
 public:
  explicit Pieces(const TokenizerSpec& spec) : unknown_(spec.unknown) {
    byte_tokens_.fill(kNoToken);
    for (size_t i = 0; i < spec.tokens.size(); ++i) {
      const auto id = static_cast<int32_t>(i);
      const TokenType type = spec.token_types[i];
      if (type == TokenType::kByte) {
        const std::optional<uint8_t> byte = ByteOf(spec.tokens[i]);
        if (byte.has_value()) byte_tokens_[*byte] = id;
      } else if (type == TokenType::kNormal || type == TokenType::kUserDefined) {
        ids_.emplace(spec.tokens[i], id);
      }
    }
  }

  int32_t Find(std::string_view text) const {
    const auto found = ids_.find(absl::string_view(text.data(), text.size()));
    return found == ids_.end() ? kNoToken : found->second;
  }

  // Of a character that is no token. Where the vocabulary lacks one of its bytes it is
  // the unknown token; several in a row are one.
  void AppendBytes(std::string_view character, std::vector<int32_t>& tokens) const {
    const size_t begin = tokens.size();
    for (const char byte : character) {
      const int32_t token = byte_tokens_[static_cast<unsigned char>(byte)];
      if (token == kNoToken) {
        tokens.resize(begin);
        return AppendUnknown(tokens);
      }
      tokens.push_back(token);
    }
  }

 private:
  void AppendUnknown(std::vector<int32_t>& tokens) const {
    if (unknown_ == kNoToken || (!tokens.empty() && tokens.back() == unknown_)) return;
    tokens.push_back(unknown_);
  }

  const int32_t unknown_;
  std::array<int32_t, 256> byte_tokens_{};
  absl::flat_hash_map<std::string, int32_t> ids_;
};

// A text's symbols, which are pieces of it, merged in the order of scores. Queued pairs
// are not removed when a neighbour merges: they are checked when they come up.
class ScoredText {
 public:
  ScoredText(const Pieces& pieces, const std::vector<float>& scores, std::string_view text)
      : pieces_(pieces), scores_(scores), text_(text) {
    for (size_t at = 0; at < text.size();) {
      const size_t bytes = CharacterBytes(text.substr(at));
      const auto index = static_cast<int32_t>(symbols_.size());
      symbols_.push_back({at, bytes, index - 1, index + 1});
      at += bytes;
    }
    if (!symbols_.empty()) symbols_.back().next = kEnd;
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) Queue(static_cast<int32_t>(i));
  }

  void MergeAll() {
    while (!candidates_.empty()) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      if (PairBytes(best.left) == best.bytes) Apply(best.left);
    }
  }

  void AppendTo(std::vector<int32_t>& tokens) const {
    for (int32_t i = symbols_.empty() ? kEnd : 0; i != kEnd; i = at(i).next) {
      const std::string_view piece = text_.substr(at(i).begin, at(i).bytes);
      const int32_t token = pieces_.Find(piece);
      if (token == kNoToken) {
        pieces_.AppendBytes(piece, tokens);
      } else {
        tokens.push_back(token);
      }
    }
  }

 private:
  static constexpr int32_t kEnd = -1;

  struct Symbol {
    size_t begin, bytes;  // no bytes: merged into its left neighbour
    int32_t previous, next;
  };
  struct Candidate {
    float score;
    int32_t left;
    size_t bytes;  // of both
    // For a queue whose top is the highest score, then the leftmost.
    bool operator<(const Candidate& other) const {
      return score != other.score ? score < other.score : left > other.left;
    }
  };

  Symbol& at(int32_t index) { return symbols_[static_cast<size_t>(index)]; }
  const Symbol& at(int32_t index) const { return symbols_[static_cast<size_t>(index)]; }

  // Of a symbol and the next one; 0 when there is no such pair.
  size_t PairBytes(int32_t left) const {
    const Symbol& symbol = at(left);
    if (symbol.bytes == 0 || symbol.next == kEnd) return 0;
    return symbol.bytes + at(symbol.next).bytes;
  }

  void Queue(int32_t left) {
    const size_t bytes = PairBytes(left);
    if (bytes == 0) return;
    const int32_t token = pieces_.Find(text_.substr(at(left).begin, bytes));
    if (token == kNoToken) return;
    candidates_.push({scores_[static_cast<size_t>(token)], left, bytes});
  }

  void Apply(int32_t left) {
    Symbol& symbol = at(left);
    Symbol& gone = at(symbol.next);
    symbol.bytes += gone.bytes;
    gone.bytes = 0;
    symbol.next = gone.next;
    if (symbol.next != kEnd) at(symbol.next).previous = left;
    if (symbol.previous != kEnd) Queue(symbol.previous);
    Queue(left);
  }

  const Pieces& pieces_;
  const std::vector<float>& scores_;
  const std::string_view text_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> candidates_;
};

class ScoredEncoder final : public SegmentEncoder {
 public:
  explicit ScoredEncoder(const TokenizerSpec& spec)
      : pieces_(spec), scores_(spec.scores), prefix_(spec.space_prefix) {}

  void Encode(std::string_view text, SegmentPlace place,
              std::vector<int32_t>& tokens) const override {
    const std::string spaced = WithSpaces(text, prefix_, place);
    ScoredText symbols(pieces_, scores_, spaced);
    symbols.MergeAll();
    symbols.AppendTo(tokens);
  }

 private:
  const Pieces pieces_;
  const std::vector<float> scores_;
  const SpacePrefix prefix_;
};

class MergingEncoder final : public SegmentEncoder {
 public:
  MergingEncoder(const TokenizerSpec& spec, BytePairMerger merger)
      : pieces_(spec), merger_(std::move(merger)), prefix_(spec.space_prefix) {}

  void Encode(std::string_view text, SegmentPlace place,
              std::vector<int32_t>& tokens) const override {
    const std::string spaced = WithSpaces(text, prefix_, place);
    std::vector<int32_t> symbols;
    for (std::string_view rest = spaced; !rest.empty();) {
      const std::string_view character = rest.substr(0, CharacterBytes(rest));
      const int32_t token = pieces_.Find(character);
      if (token == kNoToken) {
        pieces_.AppendBytes(character, symbols);
      } else {
        symbols.push_back(token);
      }
      rest.remove_prefix(character.size());
    }
    merger_.Merge(symbols, tokens);
  }

 private:
  const Pieces pieces_;
  const BytePairMerger merger_;
  const SpacePrefix prefix_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const SegmentEncoder>> CreateSentencePieceEncoder(
    const TokenizerSpec& spec) {
  if (!spec.scores.empty()) return std::make_shared<ScoredEncoder>(spec);
  HW_ASSIGN_OR_RETURN(BytePairMerger merger, BytePairMerger::Create(spec));
  return std::make_shared<MergingEncoder>(spec, std::move(merger));
}

}  // namespace heavywater
