// The choice that no policy can beat by choosing better: everything stays, and each
// query after the prompt attends to sinks, the newest, and the positions that its own
// KV head pays most in this very step. What a policy at the same budget lacks against
// it is the price of choosing before the query is known (docs/methods.md).
#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget OracleBudget(const PolicyOptions& options, const TokenBudget& tokens) {
  Budget budget;
  budget.attended_tokens = tokens.budget_tokens;
  budget.sink_tokens = options.sink_tokens;
  budget.recent_tokens = tokens.recent_tokens;
  return budget;
}

}  // namespace heavywater
