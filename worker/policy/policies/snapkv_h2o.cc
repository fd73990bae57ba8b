// SnapKV chooses at the end of the prompt and its raw window sums seed the
// scores; from then on H2O.
#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget SnapKvH2oBudget(const PolicyOptions& options, const TokenBudget& tokens,
                       int64_t prompt_tokens) {
  Budget budget = SnapKvBudget(options, tokens, prompt_tokens);
  budget.budget_tokens = tokens.budget_tokens;
  budget.recent_tokens = tokens.recent_tokens;
  budget.bounded_decode = true;
  budget.uses_scores = true;
  return budget;
}

}  // namespace heavywater
