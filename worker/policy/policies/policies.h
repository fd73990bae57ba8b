// The parameters of each policy, one file each. Given token budgets that have
// already been checked, every policy says what it protects and where its scores
// come from.
#pragma once

#include <cstdint>

#include "worker/policy/policy.h"

namespace heavywater {

// heavy + recent and recent alone; 1 <= recent_tokens <= budget_tokens - sinks.
struct TokenBudget {
  int64_t budget_tokens = 0;
  int64_t recent_tokens = 0;
};

Budget FullBudget();
Budget StreamingBudget(const PolicyOptions& options, const TokenBudget& tokens);
Budget H2oBudget(const PolicyOptions& options, const TokenBudget& tokens);
Budget SnapKvBudget(const PolicyOptions& options, const TokenBudget& tokens, int64_t prompt_tokens);
Budget SnapKvH2oBudget(const PolicyOptions& options, const TokenBudget& tokens,
                       int64_t prompt_tokens);
Budget ScissorhandsBudget(const PolicyOptions& options, const TokenBudget& tokens,
                          int64_t prompt_tokens);
Budget PyramidKvBudget(const PolicyOptions& options, const TokenBudget& tokens,
                       int64_t prompt_tokens, int num_layers);
Budget OracleBudget(const PolicyOptions& options, const TokenBudget& tokens);

}  // namespace heavywater
