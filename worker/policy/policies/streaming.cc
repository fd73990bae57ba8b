// StreamingLLM (arXiv:2309.17453), at true positions: the first tokens and the
// newest, no scores.
#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget StreamingBudget(const PolicyOptions& options, const TokenBudget& tokens) {
  Budget budget;
  budget.budget_tokens = tokens.budget_tokens;
  budget.sink_tokens = options.sink_tokens;
  // Nothing competes: what is not a sink is recent.
  budget.recent_tokens = tokens.budget_tokens - options.sink_tokens;
  budget.prompt_budget_tokens = budget.budget_tokens;
  budget.prompt_recent_tokens = budget.recent_tokens;
  budget.bounded_decode = true;
  return budget;
}

}  // namespace heavywater
