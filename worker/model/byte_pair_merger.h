// Byte-pair encoding of one word.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

// Immutable and thread safe.
class BytePairMerger {
 public:
  // INVALID_ARGUMENT naming the merge or token that does not fit the others.
  static absl::StatusOr<BytePairMerger> Create(const TokenizerSpec& spec);

  // Appends the tokens of `word` (raw bytes): starts from one token a byte and
  // merges the best pair, the leftmost of equals, until none is left. Time
  // n log n. A byte for which the vocabulary has no token yields none, as in
  // the reference tokenizer.
  void Encode(std::string_view word, std::vector<int32_t>& tokens) const;

  // Likewise from the given tokens.
  void Merge(std::span<const int32_t> symbols, std::vector<int32_t>& tokens) const;

 private:
  struct Rule {
    int32_t rank = 0;
    int32_t token = 0;  // what the pair becomes
  };
  class Word;

  const Rule* Find(int32_t left, int32_t right) const;

  std::array<int32_t, 256> byte_tokens_{};
  absl::flat_hash_map<uint64_t, Rule> rules_;  // by left << 32 | right
};

}  // namespace heavywater
