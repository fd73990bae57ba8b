#include "cache_service/registry/prefix_index.h"

#include <algorithm>
#include <utility>

namespace heavywater {
namespace {

// The finaliser of SplitMix64 (Steele et al., "Fast splittable pseudorandom number
// generators"): every bit of the input changes half of the output's.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

std::vector<uint64_t> PrefixIndex::Hashes(const Scope& scope, std::span<const int32_t> tokens) {
  uint64_t hash = Mix(static_cast<uint64_t>(scope.fingerprint));
  for (const char c : scope.tenant) hash = Mix(hash ^ static_cast<unsigned char>(c));
  std::vector<uint64_t> hashes;
  const auto page_tokens = static_cast<size_t>(scope.page_tokens);
  for (size_t end = page_tokens; end <= tokens.size(); end += page_tokens) {
    for (const int32_t token : tokens.subspan(end - page_tokens, page_tokens)) {
      hash = Mix(hash ^ static_cast<uint32_t>(token));
    }
    hashes.push_back(hash);
  }
  return hashes;
}

void PrefixIndex::Add(SequenceId sequence, const Scope& scope, std::span<const int32_t> tokens) {
  if (hashes_.contains(sequence)) return;
  std::vector<uint64_t> hashes = Hashes(scope, tokens);
  const auto count = static_cast<int64_t>(hashes.size());
  if (count == 0 || count > max_pages_) return;
  while (num_pages_ + count > max_pages_) Remove(hashes_.begin()->first);
  for (const uint64_t hash : hashes) {
    std::vector<SequenceId>& holders = sequences_[hash];
    holders.insert(std::upper_bound(holders.begin(), holders.end(), sequence), sequence);
  }
  num_pages_ += count;
  hashes_.emplace(sequence, std::move(hashes));
}

void PrefixIndex::Remove(SequenceId sequence) {
  const auto found = hashes_.find(sequence);
  if (found == hashes_.end()) return;
  for (const uint64_t hash : found->second) {
    const auto holders = sequences_.find(hash);
    if (holders == sequences_.end()) continue;  // two of its pages have one hash
    std::erase(holders->second, sequence);
    if (holders->second.empty()) sequences_.erase(holders);
  }
  num_pages_ -= static_cast<int64_t>(found->second.size());
  hashes_.erase(found);
}

std::vector<PrefixIndex::Match> PrefixIndex::Find(const Scope& scope,
                                                  std::span<const int32_t> tokens,
                                                  size_t max_matches) const {
  const std::vector<uint64_t> hashes = Hashes(scope, tokens);
  std::vector<Match> matches;
  for (size_t pages = hashes.size(); pages > 0; --pages) {
    const auto holders = sequences_.find(hashes[pages - 1]);
    if (holders == sequences_.end()) continue;
    for (auto id = holders->second.rbegin(); id != holders->second.rend(); ++id) {
      if (matches.size() == max_matches) return matches;
      const bool known = std::any_of(matches.begin(), matches.end(),
                                     [&](const Match& match) { return match.sequence == *id; });
      if (!known) matches.push_back({*id, static_cast<int64_t>(pages)});
    }
  }
  return matches;
}

}  // namespace heavywater
