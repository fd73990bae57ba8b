// PyramidKV (arXiv:2406.02069): SnapKV's vote, budgets that fall linearly over the
// layers, and (a choice of this project, the paper evicts nothing in decode) H2O with
// the layer's budget from then on.
//
// With c = the budget beyond sinks and window, layer l of L gets
//   sinks + window + c (2 - 1/beta - (2 - 2/beta) l / (L - 1)),
// from c (2 - 1/beta) down to c / beta: the same total as L equal layers, to the slot.
// beta 20. Recent is the same share of every layer's budget.
//
// Paper and published code differ. The paper's formula has the whole budget fall and
// then adds the window on top; the code, which this follows, takes the window out
// first, and where the first layers would get more than the prompt has, cuts them
// there and raises the last ones by as much. The code rounds steps down and so loses a
// few slots, and divides by L - 1, which fails with one layer: here the total is exact
// and one layer gets all of it. The code's window is 8 to 64, the paper's 8; here 32, as
// for SnapKV.
#include <algorithm>
#include <cmath>

#include "worker/policy/policies/policies.h"

namespace heavywater {
namespace {

// Of `total` slots over layers 0 to l, included: a straight line's integral, so that
// roundings never add up.
int64_t Through(double first, double last, int layer, int num_layers) {
  const double n = layer + 1;
  const double slope = num_layers > 1 ? (last - first) / (num_layers - 1) : 0;
  return static_cast<int64_t>(std::floor(n * first + slope * n * (n - 1) / 2 + 1e-6));
}

}  // namespace

Budget PyramidKvBudget(const PolicyOptions& options, const TokenBudget& tokens,
                       int64_t prompt_tokens, int num_layers) {
  Budget budget = SnapKvH2oBudget(options, tokens, prompt_tokens);
  const int64_t floor = budget.sink_tokens + budget.prompt_recent_tokens;
  const auto beyond = static_cast<double>(tokens.budget_tokens - floor);
  const double room = static_cast<double>(std::max<int64_t>(prompt_tokens - floor, 0));
  double last = num_layers > 1 ? beyond / options.pyramid_beta : beyond;
  // More than the prompt has is of no use while other layers want it.
  if (2 * beyond - last > room) last = beyond < room ? 2 * beyond - room : beyond;
  const double first = 2 * beyond - last;
  int64_t before = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    const int64_t through = Through(first, last, layer, num_layers);
    const int64_t slots = floor + through - before;
    before = through;
    const int64_t recent = std::clamp<int64_t>(
        static_cast<int64_t>(
            std::llround(static_cast<double>(tokens.recent_tokens) * static_cast<double>(slots) /
                         static_cast<double>(tokens.budget_tokens))),
        1, slots - budget.sink_tokens);
    budget.layers.push_back(
        {.budget_tokens = slots, .recent_tokens = recent, .prompt_budget_tokens = slots});
  }
  return budget;
}

}  // namespace heavywater
