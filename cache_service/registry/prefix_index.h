// Which sequences' prompts begin with which tokens, a page at a time: each whole page of a
// prompt is known by a hash over it and all pages before it. Hashes only propose: whoever
// finds a sequence compares the tokens themselves.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cache_service/base/ids.h"

namespace heavywater {

// Not thread safe.
class PrefixIndex {
 public:
  // Beyond `max_pages` of all sequences together the oldest sequences are not found any more.
  explicit PrefixIndex(int64_t max_pages) : max_pages_(max_pages) {}

  // Only sequences of the same tenant and fingerprint find each other.
  struct Scope {
    std::string_view tenant;
    FingerprintId fingerprint = 0;
    int page_tokens = 0;
  };
  // The whole pages of `tokens`. One that is there already stays as it is.
  void Add(SequenceId sequence, const Scope& scope, std::span<const int32_t> tokens);
  void Remove(SequenceId sequence);

  struct Match {
    SequenceId sequence = 0;
    int64_t pages = 0;  // that it shares, if the hashes do not lie
  };
  // The longest prefixes of `tokens` first, of those as long the newest sequence; at most
  // `max_matches`, each sequence once.
  std::vector<Match> Find(const Scope& scope, std::span<const int32_t> tokens,
                          size_t max_matches) const;

  int64_t num_pages() const { return num_pages_; }

 private:
  static std::vector<uint64_t> Hashes(const Scope& scope, std::span<const int32_t> tokens);

  const int64_t max_pages_;
  int64_t num_pages_ = 0;
  std::map<SequenceId, std::vector<uint64_t>> hashes_;
  absl::flat_hash_map<uint64_t, std::vector<SequenceId>> sequences_;  // ascending
};

}  // namespace heavywater
