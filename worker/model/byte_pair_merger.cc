#include "worker/model/byte_pair_merger.h"

#include <queue>

#include "cache_service/base/status.h"
#include "worker/model/byte_alphabet.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

using TokenIds = absl::flat_hash_map<std::string_view, int32_t>;

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

absl::StatusOr<int32_t> LookUp(const TokenIds& ids, std::string_view token,
                               std::string_view merge) {
  const auto found = ids.find(token);
  if (found != ids.end()) return found->second;
  return absl::InvalidArgumentError(Message("merge ", Quoted(merge), " needs ", Quoted(token),
                                            ", which is no token of the vocabulary"));
}

}  // namespace

absl::StatusOr<BytePairMerger> BytePairMerger::Create(const TokenizerSpec& spec) {
  TokenIds ids;
  for (size_t i = 0; i < spec.tokens.size(); ++i) {
    if (!ids.emplace(spec.tokens[i], static_cast<int32_t>(i)).second) {
      return absl::InvalidArgumentError(
          Message("token ", i, ", ", Quoted(spec.tokens[i]), ", occurs twice"));
    }
  }
  BytePairMerger merger;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids.find(ByteToAlphabet(static_cast<unsigned char>(byte)));
    merger.byte_tokens_[static_cast<size_t>(byte)] = found == ids.end() ? kNoToken : found->second;
  }
  for (size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const std::string_view merge = spec.merges[rank];
    const size_t space = merge.find(' ');
    if (space == std::string_view::npos) {
      return absl::InvalidArgumentError(Message("merge ", Quoted(merge), " is not two tokens"));
    }
    const std::string_view left = merge.substr(0, space);
    const std::string_view right = merge.substr(space + 1);
    HW_ASSIGN_OR_RETURN(const int32_t left_id, LookUp(ids, left, merge));
    HW_ASSIGN_OR_RETURN(const int32_t right_id, LookUp(ids, right, merge));
    HW_ASSIGN_OR_RETURN(const int32_t id, LookUp(ids, Message(left, right), merge));
    merger.rules_.emplace(PairKey(left_id, right_id), Rule{static_cast<int32_t>(rank), id});
  }
  return merger;
}

const BytePairMerger::Rule* BytePairMerger::Find(int32_t left, int32_t right) const {
  const auto found = rules_.find(PairKey(left, right));
  return found == rules_.end() ? nullptr : &found->second;
}

// The symbols of a word as a linked list, and the pairs that could merge in a
// queue. Queued pairs are not removed when a neighbour merges: they are checked
// when they come up.
class BytePairMerger::Word {
 public:
  Word(const BytePairMerger& merger, std::span<const int32_t> tokens) : merger_(merger) {
    symbols_.reserve(tokens.size());
    for (const int32_t token : tokens) {
      const auto index = static_cast<int32_t>(symbols_.size());
      symbols_.push_back({token, index - 1, index + 1});
    }
    if (!symbols_.empty()) symbols_.back().next = kEnd;
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) Queue(static_cast<int32_t>(i));
  }

  void MergeAll() {
    while (!candidates_.empty()) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      const Rule* rule = RuleAt(best.left);
      if (rule != nullptr && rule->rank == best.rank) Apply(best.left, rule->token);
    }
  }

  void AppendTo(std::vector<int32_t>& tokens) const {
    // The first symbol is never merged away: merges go into the left one.
    for (int32_t i = symbols_.empty() ? kEnd : 0; i != kEnd; i = at(i).next) {
      tokens.push_back(at(i).token);
    }
  }

 private:
  static constexpr int32_t kEnd = -1;

  struct Symbol {
    int32_t token;  // kNoToken: merged into its left neighbour
    int32_t previous, next;
  };
  struct Candidate {
    int32_t rank;
    int32_t left;
    // For a queue whose top is the lowest rank, then the leftmost.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };

  Symbol& at(int32_t index) { return symbols_[static_cast<size_t>(index)]; }
  const Symbol& at(int32_t index) const { return symbols_[static_cast<size_t>(index)]; }

  // The merge of symbol `left` with the next one, if there is one now.
  const Rule* RuleAt(int32_t left) const {
    const Symbol& symbol = at(left);
    if (symbol.token == kNoToken || symbol.next == kEnd) return nullptr;
    return merger_.Find(symbol.token, at(symbol.next).token);
  }

  void Queue(int32_t left) {
    if (const Rule* rule = RuleAt(left)) candidates_.push({rule->rank, left});
  }

  void Apply(int32_t left, int32_t token) {
    Symbol& symbol = at(left);
    Symbol& gone = at(symbol.next);
    gone.token = kNoToken;
    symbol.token = token;
    symbol.next = gone.next;
    if (symbol.next != kEnd) at(symbol.next).previous = left;
    if (symbol.previous != kEnd) Queue(symbol.previous);
    Queue(left);
  }

  const BytePairMerger& merger_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> candidates_;
};

void BytePairMerger::Encode(std::string_view word, std::vector<int32_t>& tokens) const {
  std::vector<int32_t> symbols;
  symbols.reserve(word.size());
  for (const char byte : word) {
    const int32_t token = byte_tokens_[static_cast<unsigned char>(byte)];
    if (token != kNoToken) symbols.push_back(token);
  }
  Merge(symbols, tokens);
}

void BytePairMerger::Merge(std::span<const int32_t> symbols, std::vector<int32_t>& tokens) const {
  Word word(*this, symbols);
  word.MergeAll();
  word.AppendTo(tokens);
}

}  // namespace heavywater
