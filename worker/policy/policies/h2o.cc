// H2O (arXiv:2306.14048): the attention that all queries so far have paid.
#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget H2oBudget(const PolicyOptions& options, const TokenBudget& tokens) {
  Budget budget;
  budget.budget_tokens = tokens.budget_tokens;
  budget.sink_tokens = options.sink_tokens;
  budget.recent_tokens = tokens.recent_tokens;
  budget.prompt_budget_tokens = tokens.budget_tokens;
  budget.prompt_recent_tokens = tokens.recent_tokens;
  budget.prompt_scores = PromptScores::kAllQueries;
  budget.bounded_decode = true;
  budget.uses_scores = true;
  return budget;
}

}  // namespace heavywater
