// Prompts whose first positions are stored: their K and V come from host pages, and only the
// rest is computed.
#pragma once

#include <cstdint>
#include <string_view>

#include "worker/policy/policy.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Of the prompt's first tokens, how many may be stored, so that what it keeps, its scores and
// its answer are those of the whole prompt: the queries whose attention counts, and those that
// recall's channels are chosen by, must be computed, and the last one for its logits. 0 for
// policies that count every query's attention. Not rounded to pages.
int64_t MostStoredTokens(const Budget& budget, const SequenceOptions& sequence);

// Why none may be (fewer than a page's, say): for people.
std::string_view WhyNoneStored(const Budget& budget);

}  // namespace heavywater
