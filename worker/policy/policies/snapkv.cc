// SnapKV (arXiv:2404.14469): the last `window` queries of the prompt vote on the
// columns before them; what comes after the prompt all stays.
#include <algorithm>

#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget SnapKvBudget(const PolicyOptions& options, const TokenBudget& tokens,
                    int64_t prompt_tokens) {
  Budget budget;
  budget.sink_tokens = options.sink_tokens;
  budget.prompt_budget_tokens = tokens.budget_tokens;
  budget.prompt_scores = PromptScores::kWindow;
  budget.window_votes = true;
  budget.window = std::min<int64_t>(options.window, prompt_tokens);
  // The window stays whole; a budget smaller than it keeps its newest part.
  budget.prompt_recent_tokens = std::min(budget.window, tokens.budget_tokens - options.sink_tokens);
  budget.pooling = options.pooling;
  budget.pool_kernel = options.pooling == Pooling::kNone ? 1 : options.pool_kernel;
  return budget;
}

}  // namespace heavywater
