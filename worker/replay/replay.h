// Policies over a trace: what each would have kept, and what its attention would have
// missed.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/policy/policy.h"
#include "worker/replay/trace_file.h"

namespace heavywater {

struct ReplayOptions {
  int num_threads = 1;
  int page_tokens = 256;
};

// Of the tokens after the prompt, over all layers and query heads, against attention to
// everything (computed in double).
struct ReplayFigures {
  int64_t queries = 0;           // tokens x layers x query heads
  double mass_kept = 0;          // of the full attention, on what the policy attended to: mean
  double error = 0;              // |out - full| / |full|, roots of sums of squares
  double agreement = 0;          // share of queries whose most attended position was attended to
  double tokens_resident = 0;    // after the last token; mean over layers
  int64_t device_bytes = 0;      // peak after the prompt
  int64_t full_cache_bytes = 0;  // of as many tokens, rounded up to a page
};

// Attention to everything, once for all policies of a trace.
class FullAttention {
 public:
  explicit FullAttention(const Trace& trace);

  // [positions 0 .. token] of a query.
  std::vector<double> Probabilities(int layer, int64_t token, int query_head) const;
  // [head_dim].
  std::vector<double> Output(int layer, int query_head,
                             const std::vector<double>& probabilities) const;

 private:
  const Trace& trace_;
  const double scale_;
};

// Runs one policy over the trace with the worker's own engine (AttentionEngine over the
// CPU backend, host memory behind it), the prompt at once, then token by token.
// INVALID_ARGUMENT as the policy's; a trace that ends with its prompt leaves nothing to
// measure. `on_token`: after each token of the continuation.
absl::StatusOr<ReplayFigures> Replay(
    const Trace& trace, const PolicyOptions& policy, const ReplayOptions& options,
    const std::function<void()>& on_token = [] {});

}  // namespace heavywater
