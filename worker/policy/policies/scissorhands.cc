// Scissorhands (arXiv:2305.17118), Algorithms 1 and 2. A position is pivotal for a
// query when its probability is above 1/t, t = the query's position + 1; the most often
// pivotal of the last `history_window` queries stay, with the newest `recent_tokens`.
// Counts are summed over the query heads of the set.
//
// Defaults, as in the paper: a window of 400 queries, 10 recent tokens. No code was
// published. Where this differs from the paper:
// - The paper counts how often a position was NOT pivotal and drops the highest: the
//   same order for positions that the whole window has seen; a newcomer is not favoured
//   here for having been seen less.
// - The paper drops half of the buffer at once; here a batch is `plan_interval_steps`
//   (16 in the preset), so that a set never holds more than its budget and a batch.
// - The paper compresses a prompt as it is read; here the whole prompt attends to
//   itself, and its last `history_window` queries count, as for every policy.
// - What the window forgets it forgets a plan at a time; the prompt's counts, which are
//   not known query by query, fade linearly (worker/rank/pivotal_history.h).
// - The paper gives later layers more of the budget, by hand; here all are alike.
#include <algorithm>

#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget ScissorhandsBudget(const PolicyOptions& options, const TokenBudget& tokens,
                          int64_t prompt_tokens) {
  Budget budget = H2oBudget(options, tokens);
  budget.gains = GainKind::kPivotal;
  budget.prompt_scores = PromptScores::kWindow;
  budget.window = std::min<int64_t>(options.history_window, prompt_tokens);
  return budget;
}

}  // namespace heavywater
