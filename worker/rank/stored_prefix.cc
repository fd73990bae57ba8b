#include "worker/rank/stored_prefix.h"

#include <algorithm>

#include "worker/cache/sketch_shape.h"

namespace heavywater {
namespace {

// Scissorhands counts a query at a time, and its history goes on from the prompt's.
bool CountsAllQueries(const Budget& budget) {
  return budget.prompt_scores == PromptScores::kAllQueries || budget.gains == GainKind::kPivotal;
}

}  // namespace

int64_t MostStoredTokens(const Budget& budget, const SequenceOptions& sequence) {
  if (CountsAllQueries(budget) || sequence.prompt_in_steps) return 0;
  int64_t computed = 1;
  if (budget.prompt_scores == PromptScores::kWindow) computed = std::max(computed, budget.window);
  if (sequence.policy.recall.enabled) computed = std::max<int64_t>(computed, kSketchQueries);
  return std::max<int64_t>(0, sequence.prompt_tokens - computed);
}

std::string_view WhyNoneStored(const Budget& budget) {
  return CountsAllQueries(budget) ? "the policy counts the attention of every prompt query"
                                  : "the prompt is not longer than a page and its last queries";
}

}  // namespace heavywater
