// Prompts that begin with pages which are stored.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

// How many sequences with the longest common prefixes are looked at: pages of the first may
// be lost, or be where they cannot be read now.
constexpr size_t kMaxCandidates = 4;

PrefixIndex::Scope ScopeOf(const v1::OpenSequenceRequest& request) {
  return {.tenant = request.tenant(),
          .fingerprint = FingerprintIdOf(request.fingerprint()),
          .page_tokens = request.fingerprint().page_tokens()};
}

}  // namespace

absl::Status SequenceRegistry::CheckPrefix(const v1::OpenSequenceRequest& request) {
  if (!request.has_prefix()) return absl::OkStatus();
  const int64_t tokens = request.prefix().tokens_size();
  HW_RETURN_IF_ERROR(CheckInt("number of prefix.tokens", tokens, 0, request.max_tokens()));
  return CheckInt("prefix.max_tokens", request.prefix().max_tokens(), 0, tokens);
}

// A prompt is known, and exact (every query has seen all before it), up to where it ended
// when the sequence was opened; what came after it was computed with a compressed cache.
void SequenceRegistry::OfferPrefix(SequenceId id, const Record& record) {
  const auto prompt = static_cast<size_t>(record.request.prompt_tokens());
  const std::vector<int32_t>& tokens = record.plans.tokens();
  if (!record.request.has_prefix() || prompt == 0 || tokens.size() < prompt) return;
  prefixes_.Add(id, ScopeOf(record.request), std::span(tokens).first(prompt));
}

std::vector<SequenceRegistry::Prefix> SequenceRegistry::PrefixCandidates(
    const v1::OpenSequenceRequest& request) {
  const auto& tokens = request.prefix().tokens();
  const std::span<const int32_t> wanted(tokens.data(),
                                        static_cast<size_t>(request.prefix().max_tokens()));
  std::vector<Prefix> candidates;
  MutexLock lock(&mutex_);
  for (const PrefixIndex::Match& match : prefixes_.Find(ScopeOf(request), wanted, kMaxCandidates)) {
    Record& record = records_.at(match.sequence);
    const v1::OpenSequenceRequest& opened = record.request;
    const std::vector<int32_t>& known = record.plans.tokens();
    const int64_t count = match.pages * opened.fingerprint().page_tokens();
    // Hashes may lie.
    if (opened.tenant() != request.tenant() || count > opened.prompt_tokens() ||
        count > static_cast<int64_t>(std::min(known.size(), wanted.size())) ||
        !CompareFingerprints(opened.fingerprint(), "it has", request.fingerprint(), "wanted")
             .ok() ||
        !std::equal(known.begin(), known.begin() + count, wanted.begin())) {
      continue;
    }
    if (!record.plans.agreement().ok()) continue;
    record.last_use = clock_.Now();
    candidates.push_back({match.sequence, count});
  }
  return candidates;
}

// Waits for the tiers below, and reads all of the pages: not under the lock.
SequenceRegistry::Prefix SequenceRegistry::FindPrefix(const v1::OpenSequenceRequest& request) {
  Prefix best;
  for (const Prefix& candidate : PrefixCandidates(request)) {
    if (candidate.tokens <= best.tokens) continue;
    if (!store_.BringUp(candidate.source, candidate.tokens).ok()) continue;
    const absl::StatusOr<int64_t> ready =
        store_.PrepareShare(candidate.source, candidate.tokens, /*exact=*/true);
    if (ready.ok() && *ready > best.tokens) best = {candidate.source, *ready};
  }
  return best;
}

absl::StatusOr<int64_t> SequenceRegistry::OpenPages(const SequenceSpec& spec,
                                                    const Prefix& prefix) {
  if (prefix.tokens > 0) {
    absl::StatusOr<int64_t> shared =
        store_.OpenFrom(spec, {.sequence = prefix.source, .tokens = prefix.tokens});
    // Or the source has ended meanwhile: then as if there had been none.
    if (shared.ok() || !absl::IsNotFound(shared.status())) return shared;
  }
  HW_RETURN_IF_ERROR(store_.Open(spec));
  return 0;
}

void SequenceRegistry::CountPrefix(const v1::OpenSequenceRequest& request, int64_t tokens) {
  if (!request.has_prefix()) return;
  ++prefix_stats_.lookups;
  if (tokens > 0) ++prefix_stats_.hits;
  prefix_stats_.tokens += tokens;
}

SequenceRegistry::PrefixStats SequenceRegistry::prefix_stats() const {
  MutexLock lock(&mutex_);
  PrefixStats stats = prefix_stats_;
  stats.indexed_pages = prefixes_.num_pages();
  return stats;
}

}  // namespace heavywater
