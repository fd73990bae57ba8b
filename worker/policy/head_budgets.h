// A layer's slots divided among its KV heads as its scores are spread: Ada-KV (Feng et
// al. 2024, arXiv:2407.11550, Algorithm 2), for every policy that scores the prompt.
//
// Protected positions (sinks; the voting window, or what is recent) stay in each head.
// Beyond them a layer of H heads has H x c slots, c = an even share. The H x c highest
// scores of all heads together are found; a head with n of them gets
//   floor(f c) + floor((c - floor(f c)) n / c)
// slots, and those that rounding leaves go to the heads with most of them. f
// (head_budget_floor) is 0.2, as in the published code.
//
// Where this differs from that code: it rounds each head to the nearest, and so may come
// to a few slots more or less than the budget; here the total is exact. It keeps every
// token after the prompt; here `h2o` goes on within each head's budget, as everywhere
// (recent is the same share of every head's). Its option to weigh a head's scores by
// how much its best hold is not taken: it is off in its experiments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/policy/policy.h"

namespace heavywater {

// What the KV heads of a layer compete by at the end of the prompt. A view.
struct HeadScores {
  std::span<const int64_t> scores;  // [num_heads][num_tokens]
  int num_heads = 0;
  int64_t num_tokens = 0;
  int64_t first = 0;  // positions [first, end) compete; the others are protected
  int64_t end = 0;
};

// Slots beyond the protected for each head: num_heads x `even` in all, no more than
// end - first for one, which must be at least `even`. Of equal scores those of the lower
// head and the lower position count first. Pure, and integers: every rank that sees
// the same scores returns the same.
std::vector<int64_t> DivideSlots(const HeadScores& scores, int64_t even, double floor);

// The most that the heads of one rank can get by it, before scores are known: the first
// as much as any head may get, the others what the total then leaves them. Never less
// for a larger `even` or more `candidates` (end - first).
std::vector<int64_t> MostSlots(int num_heads, int own_heads, int64_t even, int64_t candidates,
                               double floor);

// A head's budget where an even share of the layer would be `even` and it keeps `kept`
// positions of the prompt.
LayerBudget BudgetOfHead(const LayerBudget& even, int64_t sink_tokens, int64_t kept);

}  // namespace heavywater
